"""``python -m tests.benchmarks.downstream``; what it does is in comparison.py."""

from tests.benchmarks.downstream.comparison import main

main()

"""``python -m tests.benchmarks.wan``; what it does is in comparison.py."""

from tests.benchmarks.wan.comparison import main

main()

"""``python -m tests.benchmarks.all_reduce``; what it does is in comparison.py."""

from tests.benchmarks.all_reduce.comparison import main

main()

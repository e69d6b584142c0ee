"""``python -m tests.benchmarks.inner_loop``; what it does is in comparison.py."""

from tests.benchmarks.inner_loop.comparison import main

main()

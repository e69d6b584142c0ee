"""``python -m tests.benchmarks.convergence``; what it does is in comparison.py."""

from tests.benchmarks.convergence.comparison import main

main()

"""``python -m tests.benchmarks.network_model``; what it does is in comparison.py."""

from tests.benchmarks.network_model.comparison import main

main()

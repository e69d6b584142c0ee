"""``python -m tests.benchmarks.scrape``; what it does is in comparison.py."""

from tests.benchmarks.scrape.comparison import main

main()

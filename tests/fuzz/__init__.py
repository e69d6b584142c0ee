"""Arbitrary bytes for everything that reads a stranger's: ``python -m tests.fuzz``."""

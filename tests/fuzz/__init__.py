"""Arbitrary bytes for every parser of untrusted input: ``python -m tests.fuzz``."""

"""Thousands of peers by a model of time alone: who waits how long on which network. Nothing is trained."""

"""The average of a group of everyone."""

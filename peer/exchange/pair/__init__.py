"""The swap of two peers."""

"""Tensors between peers. Knows bytes, digests and deadlines; knows no method and no directory."""

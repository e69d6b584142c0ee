"""A peer of several ranks: one process a GPU, started by torchrun. Rank 0 is the peer, the others do as it says."""

"""Many replicas in one process, on a simulated clock, through the peer's own inner loop and outer methods."""

"""Who is there, whom I meet. The only package besides exchange/ that may import hivemind."""

"""All peers come together as one group."""

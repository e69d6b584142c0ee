"""The configuration: its types, where values come from, and the digest by which peers compare it."""

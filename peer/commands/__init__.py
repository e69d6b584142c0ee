"""The commands of ``noloco-peer``."""

"""The outer step: what two peers do with their weights every H inner steps. Arithmetic only, no I/O."""

"""How a node is reached that others cannot dial."""

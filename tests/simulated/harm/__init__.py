"""What goes wrong: faults of machines and lines, members that lie, outsiders."""

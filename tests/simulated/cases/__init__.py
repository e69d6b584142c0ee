"""Single worlds, made by hand: each shows one promise or one defect that a seed has found."""

"""The values and rules of a round: pure, without network, files or threads of their own."""

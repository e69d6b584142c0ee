"""The words and rules of a round: pure, without network, files or threads."""

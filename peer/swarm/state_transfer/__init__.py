"""A newcomer takes the state of a member."""

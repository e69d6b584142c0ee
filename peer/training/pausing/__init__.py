"""A peer that pauses. requests.py says when, by a person's word and by the hours; rest.py is the pause itself."""

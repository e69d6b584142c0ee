"""A swarm of real peers under attack: what each attack costs the honest."""

"""A swarm of real peers under attack: what each attack costs the honest.

attacks.py is the table of attacks, besieged.py the swarm, figures.py what is measured of it. The attackers, each a
process of its own: outsider.py, with requests.py and streams.py, speaks to the nodes' protocols without our checks;
member.py is a member of the run.
"""

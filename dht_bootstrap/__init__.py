"""The bootstrap node: a fixed address by which peers find the swarm. It trains nothing and may die at any time.

It knows the network (peer.p2p), the members' records (peer.swarm) and the names of the series (peer.telemetry), and
nothing of training. Reading order: cli.py, addresses_file.py, watch.py (reads the directory), history.py (of each
peer) with refusals.py (whom others refused), contributors.py (what each has given), configurations.py (of each run),
findings.py (warnings), view.py and page/ (for people), collector.py and targets.py (for Prometheus), monitor.py (serves
all of them), owner.py (of an invited swarm).
"""

"""The bootstrap node: a fixed address by which peers find the swarm. It trains nothing and may die at any time.

It knows the network (peer.p2p), the members' records (peer.swarm) and the names of the series (peer.telemetry), and
nothing of training. Reading order: cli, addresses_file, watch (reads the directory), history (of each peer),
contributors (what each has given), configurations (of each run), findings (warnings), view and page/ (for people),
collector and targets (for Prometheus), monitor (serves all of them), owner (of an invited swarm).
"""

"""The bootstrap node: a fixed address by which peers find the swarm. It trains nothing and may die any time.

It knows the network (peer.p2p), the records of a swarm's members (peer.swarm) and the names of their series
(peer.telemetry), and nothing of training. Read in this order: cli, watch (reads the directory), history (what became of
each peer), findings (what a person should know), then what shows it: view and page/ for people, collector and targets
for Prometheus, monitor, which serves all of them. owner is the command line of an invited swarm's owner.
"""

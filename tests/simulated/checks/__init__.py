"""What holds: of each swap (ledger.py), of the whole swarm (promises.py), of the peers' conduct (conduct.py)."""

"""The network below the simulated peers: hosts and lines, relays, the DHT, invitations."""

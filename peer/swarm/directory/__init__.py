"""The directory of members in the DHT."""

"""The peer-to-peer network: the only package that imports hivemind."""

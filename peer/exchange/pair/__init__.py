"""The swap of two peers. A blocking swap uses nothing before all is verified, an overlapped one each part by itself.

Read protocol.py (a swap from header to verdict), wire.py and handshake.py (its messages), then blocking.py, or
mailbox.py and overlapped.py. Knows nothing of groups; contributions are whole vectors.
"""

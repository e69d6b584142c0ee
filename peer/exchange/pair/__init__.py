"""The swap of two peers. A blocking swap uses nothing before all is verified; an overlapped one, each part by itself.

Reading order: wire.py (the messages), protocol.py (a swap from header to verdict), then blocking.py, or mailbox.py and
overlapped.py. It knows nothing of groups.
"""

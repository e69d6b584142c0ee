"""The outer methods: what a peer does with its weights every H inner steps. Arithmetic only.

A method knows its formula and the slow weights. It knows no network, no files and no other peer; the caller averages.

Reading order: method.py (the interface, and from a configuration to a method), slow_weights.py (φ on the host, θ in the
model), noloco.py (also part by part, beside the inner steps), diloco.py, decoupled.py with dct.py.
"""

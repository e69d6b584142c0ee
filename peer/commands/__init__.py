"""The commands of ``noloco-peer``: a file or a package each.

They may import every other package; only ``python -m peer`` imports them. A command imports what it needs when it runs,
so that the others start at once.

Reading order: cli.py (all options; arguments.py has their types), then each command: join/, check/, local_swarm/
(``swarm``), simulate/, export/, status.py, pause.py (with ``resume``), tokenize.py. peer/training has the work of
``train``.
"""

"""The configuration: its types, how it is loaded, and the digest by which peers compare it.

It knows YAML, environment and command line overrides. It builds nothing. Of other packages it imports errors, logs
and the form of a name (rounds/types.py).

Reading order: schema.py (``run`` and ``peer``), methods.py (``run.outer``), data.py and model.py (``run.data``,
``run.model``), fields.py (what the sections are made of), load.py (files to a checked configuration), digest.py
(comparison with another peer), received.py (``run`` as another peer sent it). files.py writes a whole file or none, of
any kind and for all packages.
"""

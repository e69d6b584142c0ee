"""What this program knows of accelerators: NVIDIA's and AMD's (torch calls both ``cuda``), Apple's and Intel's.

No other package names one. It knows no model, no network and no files.

Reading order: accelerator.py (which device, its number format, random state and ranks), copies.py (between the host and
a device), memory.py (its figures, and the end of it).
"""

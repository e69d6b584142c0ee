"""What only an accelerator shows: `make gpu-test`. Its arithmetic runs on the CPU too (README.md).

Reading order: site.py, __main__.py, checks/ (a file a subject), swapping.py, programs/ (processes of a check).
"""

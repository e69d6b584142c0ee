"""What a peer reports: Prometheus series, files in its run folder, log lines, trackers.

It knows rounds, the inner loop's report and the member record. It changes nothing and decides nothing.

Reading order: series.py (the table of all series), metrics.py (their values, and the clock of the phases), report.py
(one row a round), peer_status.py (the part of it that goes into the member record), trackers.py (TensorBoard, W&B).
"""

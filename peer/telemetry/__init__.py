"""What a peer reports: Prometheus series, files in its run folder, log lines, trackers. It decides nothing.

Reading order: series.py (the table of all series), metrics.py (their values, and the timer of the activities),
http_server.py, report.py (one report a round), run_log.py (reads the files of the run folder), trackers.py
(TensorBoard, W&B).
"""

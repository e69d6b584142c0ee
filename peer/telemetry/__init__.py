"""What a peer tells about itself: Prometheus series, the files of a run, the log, trackers. It knows no training.

Reading order: series.py, metrics.py, report.py, peer_status.py, trackers.py.
"""

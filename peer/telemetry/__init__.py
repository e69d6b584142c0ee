"""What a peer says of itself: series, files, trackers."""

"""One run: its folder, log, checkpoints, and stopping on request."""

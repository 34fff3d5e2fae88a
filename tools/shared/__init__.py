"""What several tools share: their command lines and output, runs that they read, start, interrupt or load, plots."""

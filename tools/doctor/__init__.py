"""Checks of machines, nodes and devices before a job. Each takes its input as arguments and returns a `Finding`."""

"""Checks of machines, nodes and devices before a job. Each takes what it judges and returns a `Finding`."""

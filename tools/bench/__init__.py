"""Measurements with one protocol: `python -m tools.bench --help`."""

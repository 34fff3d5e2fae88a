"""PROF: named ranges, traces, and their summary in words."""

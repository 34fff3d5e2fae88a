"""Flipped bits, on purpose: whether a checked step finds them."""

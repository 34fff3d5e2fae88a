"""Stored records of the doctor: many nodes and days, and the page that compares nodes."""

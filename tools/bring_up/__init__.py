"""One command for a new GPU: `python -m tools.bring_up --out DIR`. parts.py has the table of its parts."""

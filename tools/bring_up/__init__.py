"""One command for a new GPU: `python -m tools.bring_up --out DIR --minutes M`. The table of its parts is parts.py."""

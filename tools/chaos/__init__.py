"""A campaign of faults: runs that are killed, stopped, cheated and robbed, and end as if nothing had been."""

"""Several processes: how they are launched, meet, talk, and leave together."""

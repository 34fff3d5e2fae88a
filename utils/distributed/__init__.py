"""Several processes: launch, start, collectives, failure and exit."""

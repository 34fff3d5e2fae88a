"""Several processes: launch, rendezvous, collectives, failure and exit."""

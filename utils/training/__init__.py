"""Training: precision, optimizer, schedule, step, validation, and the checks on them."""

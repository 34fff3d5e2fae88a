"""What trains: network, optimizer, schedule, precision and the step."""

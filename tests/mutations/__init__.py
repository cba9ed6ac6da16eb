"""Put known faults into the core one at a time, and find the tests that fail."""

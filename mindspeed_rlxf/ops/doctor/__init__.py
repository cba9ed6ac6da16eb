"""Check hosts, devices and networks before a run starts."""

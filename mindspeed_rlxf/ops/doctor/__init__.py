"""Find what keeps a run from working before it starts: hosts, devices, and what joins them."""

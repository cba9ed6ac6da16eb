"""Plan a run before a device is claimed: rank placement, memory, disk."""

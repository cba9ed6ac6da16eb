"""Plan a run before a device is claimed: placement of ranks, memory, disk, predicted time."""

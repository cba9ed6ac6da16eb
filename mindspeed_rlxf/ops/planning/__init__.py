"""Plan a run before a device is claimed: places of ranks, memory, disk, time."""

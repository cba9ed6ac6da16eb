"""Plan the memory and the places of a run before a device is claimed."""

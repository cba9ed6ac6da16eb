"""What a run needs and where it runs, worked out before a device is claimed."""

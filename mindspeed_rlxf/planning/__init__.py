"""What a run will need and where it will run, worked out before a device is claimed."""

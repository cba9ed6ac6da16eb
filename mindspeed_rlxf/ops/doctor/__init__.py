"""Check hosts, devices and networks before a run starts, and bundle the files of a failed run."""

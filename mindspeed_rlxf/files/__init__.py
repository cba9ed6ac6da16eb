"""Open, read and write files that may be hostile, or that others must not read."""

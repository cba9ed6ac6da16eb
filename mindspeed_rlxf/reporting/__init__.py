"""The run directory, its metric and sample files, and progress on the console."""

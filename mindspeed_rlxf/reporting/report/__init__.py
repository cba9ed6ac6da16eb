"""Make the report of runs: one HTML file with curves, schedule and samples; it needs no network."""

"""The report of runs: one HTML file with curves, schedule and samples, that needs no network."""

"""Report on a run: console, metric and sample files, trackers, health rules, timeline, page."""

"""Run reporting: console, metric and sample files, trackers, health rules, timeline, report."""

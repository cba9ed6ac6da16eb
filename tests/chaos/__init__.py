"""Runs that are killed at random moments, started again, and compared with one that was not."""

"""Recorded curves of short runs, one for each estimator."""

"""Faults that are put into the core one at a time, and the tests that see them."""

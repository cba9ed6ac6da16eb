"""Rule rewards: pure scoring functions and the manager that picks one by data source."""

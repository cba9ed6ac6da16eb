"""Kill runs at random moments, restart them, and compare the result with an undisturbed run."""

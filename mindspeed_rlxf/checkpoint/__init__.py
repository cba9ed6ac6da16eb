"""Run directory, lock, checkpoints and records; how a run stops and resumes."""

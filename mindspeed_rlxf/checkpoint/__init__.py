"""Directory, lock, checkpoints, records and exports of a run; how a run stops and resumes."""

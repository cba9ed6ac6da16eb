"""What a run leaves behind and goes on from: its directory, checkpoints, resume and records."""

"""The command `generate`: responses of a run's policy, or of any model in a folder."""

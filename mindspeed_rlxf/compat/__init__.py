"""The older toolkit: its YAML keys and flags, translated or refused. Only commands use it."""

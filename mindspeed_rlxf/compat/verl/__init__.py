"""verl: its YAML, its reward managers and the classes of its tutorial."""

"""Configuration: compose the YAML, resolve it into the typed schema, check it."""

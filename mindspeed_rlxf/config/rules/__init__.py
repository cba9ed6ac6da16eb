"""Rules between keys: what a configuration must keep, as problems with rule, value and remedy."""

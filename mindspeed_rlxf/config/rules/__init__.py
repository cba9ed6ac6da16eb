"""Rules between keys. Each check yields a `Problem` for every broken rule, and raises nothing."""

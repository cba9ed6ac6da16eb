"""Training with torch's fully sharded data parallelism over models of transformers."""

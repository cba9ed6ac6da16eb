"""Files that vLLM's processes import, by their folder; the trainer imports none of them."""

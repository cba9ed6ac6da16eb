"""Generation engines, and the weights they see."""

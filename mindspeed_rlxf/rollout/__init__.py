"""Generation engines, and weight transfer to them."""

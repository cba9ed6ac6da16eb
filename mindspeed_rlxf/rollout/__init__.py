"""Generation engines, and the transfer of trained weights to them."""

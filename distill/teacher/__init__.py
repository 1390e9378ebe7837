"""What a frozen teacher gives for a batch, live or from a cache."""

"""What a frozen teacher says of a batch, live or from a cache."""

"""Text from its source to micro-batches of token ids."""

"""How fast sequences are prepared, loaded, and read from object storage."""

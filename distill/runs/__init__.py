"""A run on disk: what it leaves in its folder, and the record of it."""

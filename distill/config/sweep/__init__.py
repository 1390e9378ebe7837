"""The folders of a sweep: their names, and an index of what was swept in each."""

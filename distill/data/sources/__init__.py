"""One file for each kind of text."""

"""What measures nothing: the list of installed packages, and the manual's pictures."""

"""Seconds, hours and money of a run on machines that nobody has rented yet, and what binds."""

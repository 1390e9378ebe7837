"""What a run would take on machines that nobody has rented yet: seconds of a step, hours, money, and what binds."""

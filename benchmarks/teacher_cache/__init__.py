"""What a cache of the teacher's outputs costs, saves and loses."""

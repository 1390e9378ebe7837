"""The settings of a run: one frozen model for each section, with default, range, unit and meaning of every field."""

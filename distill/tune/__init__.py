"""Short trials of the settings that make a run faster and leave its student as it is."""

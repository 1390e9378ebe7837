"""The scripts behind every number of the manual, in a folder for each subject."""

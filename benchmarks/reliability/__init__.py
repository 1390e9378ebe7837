"""Runs and Slurm jobs that are killed, stopped or damaged: the student has to stay bitwise the same."""

"""Attacks on whole commands, by subject, and what came of each: `python benchmarks/attacks`."""

"""Scores models that exist on evaluation sets, without training: `distill evaluate`, or `distill.evaluate`."""

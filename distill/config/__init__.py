"""The door: Hydra, recipes, overrides, and rules that concern several sections of the settings."""

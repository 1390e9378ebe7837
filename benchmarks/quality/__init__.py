"""How good students become, and how long that takes."""

"""What happens to a run beside the arithmetic of its steps: its health, and those who look on."""

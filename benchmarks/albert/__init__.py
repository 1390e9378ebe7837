"""Pre-training of ALBERT: its quality, and its scaling on emulated hosts."""

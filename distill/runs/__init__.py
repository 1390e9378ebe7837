"""A run on disk: its folder, checkpoints, identity, record, logs and those who observe its training."""

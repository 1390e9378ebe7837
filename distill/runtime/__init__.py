"""What a process owes its machine: errors, files, signals, storage, progress and seeds."""

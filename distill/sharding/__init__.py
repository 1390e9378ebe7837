"""Models whose weights are divided between the ranks of a run, by torch's `fully_shard` (FSDP2)."""

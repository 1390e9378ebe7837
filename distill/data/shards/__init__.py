"""Sequences of token ids in files of a bounded size, on disks and in object storage."""

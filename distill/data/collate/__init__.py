"""One file for each task: rows of token ids become micro-batches."""

"""One file for each task: sequences of token ids become micro-batches."""

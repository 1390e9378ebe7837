"""How fast a step, the objective, pseudo-perplexity and checkpoints are."""

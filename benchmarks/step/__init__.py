"""How fast a step is, beside a plain one and those of others; the objective and pseudo-perplexity by themselves."""

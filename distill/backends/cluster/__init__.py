"""Files for schedulers and container platforms; `python -m distill.backends.cluster` prints them."""

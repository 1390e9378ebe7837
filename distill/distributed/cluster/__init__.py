"""Files for schedulers and container platforms; `python -m distill.distributed.cluster` prints them."""

"""Loss terms, their weights and the kernels that compute them."""

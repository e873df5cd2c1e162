"""Attention as custom ops: the semantic op, the paged ops of each backend, the KV cache and the batch metadata. Needs torch
alone; kernels and their packages are loaded by the backends that use them."""

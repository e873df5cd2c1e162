"""Triton kernels that no single attention backend owns."""

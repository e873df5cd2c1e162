"""Attention backends, one file (or folder, where there are kernels) each. They register by entry point."""

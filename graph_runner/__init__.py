"""Runs traced models: buckets, CUDA graphs, block allocation, scheduling, sampling, and the engine that ties them."""

"""Graph passes: from a traced model to one whose attention runs on a paged KV cache.

capture -> (raising) -> verification -> lowering -> fusion -> Inductor. See ``passes/pipeline.py`` for the order.
"""

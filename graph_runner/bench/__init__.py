"""``quire bench``: the speed of decoding, mixed traffic, prefill and start-up, beside rivals and the floor."""

"""``quire bench``: decoding, mixed traffic, prefill and start-up, beside rivals and the roofline."""

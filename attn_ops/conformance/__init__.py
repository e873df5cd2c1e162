"""The conformance kit: whether an attention backend does what it declares, and refuses the rest.

    python -m quire.attn_ops.conformance --backend NAME [--device cpu|cuda] [--dtype float32|...] [--kv-dtype int8|...]

or ``quire.check_backend(BACKEND)``. The kit lays out ragged batches, runs the backend's paged op on them as a model does
(state, plan, prepare, op), and compares with the eager attention in float64. Each check prints one line with the largest error,
as a number and in units of its bound; the exit code is 1 if one fails. CONTRIBUTING.md has the options.

Most checks use small shapes, with many cases each. Those of "real shapes" (``real_shapes.py``) run each feature, and features
together, with heads of 64 to 256, groups of 1 and 8, pages of 16 and 64, 1 and 17 sequences, windows and chunks of 128 and more
and up to 2100 tokens, where these are declared.

Tolerance: 1e-5 (float32 sums) and two eps of the dtype, of the output and of the weighted sum of \\|v\\|, because the softmax
weights and the output are each rounded once. The same holds for quantized caches, with keys and values as they read back;
codes and scales must equal those of ``attn_ops/kv_quant.py`` bit for bit, so that backends can share a cache. Without
--kv-dtype the checks use a cache of the model's dtype, and one check runs each quantized dtype that is declared.

Not covered: a cache of another floating-point dtype than the model's, norms of the heads in ``rope_op``, speed.
"""

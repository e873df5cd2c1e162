"""How a quantized KV cache stores keys and values: the definition that every backend follows bit for bit.

The vector x of one KV head and one token is stored as codes in the cache's dtype and one float32 ``scale``, computed when the
token is written and never changed:

    scale = max(max|x| / qmax, smallest normal float32)      codes = x / scale, rounded to the nearest code, ties to even

Every query attends to ``codes * scale``, the token's own included, so that results depend no more on how a sequence was cut
into steps, and on which backend wrote a page, than the keys before rounding do (where a last bit can select the next code). The
largest element keeps its value up to float32 rounding; no calibration is needed, and nothing saturates. A vector with a NaN or
an infinity gets scale NaN and codes 0: all of it reads back as NaN. A zero is code 0 without a sign. Vectors below the range of
float32's normal numbers read back as zeros.

Kernels of some packages take one number for all keys of a layer and one for all values. For them an fp8 cache may have *fixed*
scales: two numbers per layer that the user gives (``PagedKVCache(kv_scales=)``), and that nothing computes or changes. Codes
are as above, but an element that does not fit, ``|x| / scale > qmax``, is stored as the code of NaN, as a NaN and an infinity
are, and reads back as NaN, without the rest of its vector: nothing saturates unnoticed. int8 has no such code. The shape of the
scale tells the form: a fixed one is (1, 1, 1), others are (pages, page_size, Hkv) of at least two pages (``is_fixed``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

KVScales = float | Mapping[int, tuple[float, float]]


QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
QUANTIZED_KV_DTYPES = frozenset(QMAX)
FIXED_SCALE_KV_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
#: Names for ``kv_cache_dtype`` in addition to torch's.
ALIASES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def quantize(x: torch.Tensor, dtype: torch.dtype, of: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., Hkv, D), floating point -> codes (..., Hkv, D) in ``dtype``, scale (..., Hkv) float32. ``of``: the scales of the
    cache; where that is a fixed one, it is the scale returned, (1, 1)."""
    qmax, x = QMAX[dtype], x.float()
    if of is not None and is_fixed(of):
        scaled = x / of[0]  # a tensor, see below
        return _float_codes(scaled.masked_fill(~(scaled.abs() <= qmax), float("nan")), dtype), of[0]
    largest = x.abs().amax(-1)  # NaN if x has one
    # By a tensor: on CUDA, division by a number multiplies by its reciprocal, which rounds differently.
    scale = (largest / torch.full_like(largest, qmax)).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale.masked_fill(scale.isinf(), float("nan"))
    scaled = (x / scale.unsqueeze(-1)).nan_to_num(nan=0.0).clamp(-qmax, qmax)
    if not dtype.is_floating_point:
        return scaled.round().to(dtype), scale
    return _float_codes(scaled, dtype), scale


def _float_codes(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (scaled.to(dtype).float() + 0.0).to(dtype)  # + 0.0: no negative zero


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes (..., D), scale (...), or a fixed one of no more dims -> (..., D) float32."""
    return codes.float() * scale.unsqueeze(-1)


def is_fixed(scale: torch.Tensor | None) -> bool:
    """Whether this is the fixed scale of a layer's keys or values, and not one for each token and head."""
    return scale is not None and tuple(scale.shape) == (1, 1, 1)


def check_kv_scales(kv_scales: KVScales, dtype: torch.dtype | None, layers: Collection[int] | None = None
                    ) -> dict[int, tuple[float, float]]:
    """Fixed scales of keys and values by layer, as float32 holds them. ``layers``: those that have a cache of their own; None:
    not known yet. Raises ValueError for a dtype that is not fp8, scales that are not such numbers, and other layers."""
    if dtype not in FIXED_SCALE_KV_DTYPES:
        why = " (int8 has no NaN, which says that a number does not fit)" if dtype == torch.int8 else ""
        raise ValueError(f"kv_scales={kv_scales!r} are the fixed scales of an fp8 KV cache{why}: set kv_cache_dtype='fp8' or "
                         "'fp8_e5m2', or leave kv_scales out for a scale of each token and key head")
    if not isinstance(kv_scales, Mapping):
        kv_scales = dict.fromkeys(layers or (0,), (kv_scales, kv_scales))
    elif layers is not None and set(kv_scales) != set(layers):
        raise ValueError(f"kv_scales has scales for layers {sorted(kv_scales)}; the layers that have keys and values of their "
                         f"own are {sorted(layers)}")
    for layer, both in kv_scales.items():  # a code times its scale must stay in the range of float32's normal numbers
        if not isinstance(both, Sequence) or len(both) != 2 or not all(
                isinstance(x, (int, float)) and 1e-30 <= x <= 1e30 for x in both):
            raise ValueError("kv_scales must be numbers between 1e-30 and 1e30, one for keys and one for values; layer "
                             f"{layer} has {both!r}")
    rounded = {layer: torch.tensor(both, dtype=torch.float32).tolist() for layer, both in kv_scales.items()}
    return {layer: (k, v) for layer, (k, v) in rounded.items()}


def check_scales(k_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, *, fixed: bool = False
                 ) -> None:
    """Raises ValueError unless there are scales iff the caches are quantized. ``fixed``: whether fixed ones are served."""
    quantized = k_cache.dtype in QUANTIZED_KV_DTYPES
    if (k_scale is not None, v_scale is not None) != (quantized, quantized):
        raise ValueError(f"a KV cache of {k_cache.dtype} {'needs' if quantized else 'takes no'} k_scale and v_scale; pass "
                         "PagedKVCache.of_layer(layer) as it is")
    if is_fixed(k_scale) != is_fixed(v_scale) or is_fixed(k_scale) and k_cache.dtype not in FIXED_SCALE_KV_DTYPES:
        raise ValueError("fixed scales are those of keys and values of an fp8 KV cache; make it with PagedKVCache(kv_scales=)")
    if is_fixed(k_scale) and not fixed:
        raise ValueError("this KV cache has one fixed scale per layer (kv_scales), which these kernels do not serve: they read "
                         "no code as NaN. Use a backend that declares it, see quire.backends(), or leave kv_scales out")


def write(cache: torch.Tensor, scale: torch.Tensor | None, new: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store ``new`` (T, Hkv, D) at its slots of ``cache``, as codes if there is a ``scale``; both are mutated, but for a fixed
    scale. A slot of -1 writes back what slot 0 of the null page holds."""
    slot = slot_mapping.clamp_min(0)
    page, offset = slot // cache.shape[1], slot % cache.shape[1]
    live = (slot_mapping >= 0)[:, None, None]
    if scale is not None:
        new, new_scale = quantize(new, cache.dtype, scale)
        if not is_fixed(scale):
            scale[page, offset] = torch.where(live[..., 0], new_scale, scale[page, offset])
        cache, new = cache.view(torch.int8), new.view(torch.int8)  # bytes: torch does not index fp8 everywhere
    cache[page, offset] = torch.where(live, new.to(cache.dtype), cache[page, offset])


def write_kv(k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
             k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor) -> None:
    """``write`` k and v; where they are None, the cache has them already."""
    if k is not None and v is not None:
        write(k_cache, k_scale, k, slot_mapping)
        write(v_cache, v_scale, v, slot_mapping)

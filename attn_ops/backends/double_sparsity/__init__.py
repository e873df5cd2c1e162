"""Backend ``double_sparsity:TOKENS:DENSE_BELOW:CHANNELS:FILE``: decoding over TOKENS of a sequence's keys. An approximation.

Double sparsity (Yang et al., 2024, arXiv:2408.07092): a few channels of the keys show which tokens matter. A *label* is a key
in CHANNELS channels of its head, chosen once by ``quire calibrate`` and read from FILE. Decoding multiplies each query head
with the labels of all tokens, takes the TOKENS largest, and attends exactly to these. With ``all`` in place of CHANNELS:FILE
whole keys are the labels.

Exact: sequences of at most max(TOKENS, DENSE_BELOW) tokens, and every step with a prefill, which another backend attends.
Labels take CHANNELS / (D + Dv) of the memory of keys and values, beside the KV cache; they are made of the new keys in each
step, so every step must run through this backend.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    BackendFamily,
    CudagraphSupport,
    define_paged_op,
    define_prepare,
)
from quire.attn_ops.backends.double_sparsity.decode import NAME, LayerLabels, Options, decode_eager, decode_triton, labels_of
from quire.attn_ops.composite import op_name
from quire.attn_ops.kernels import host
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.registry import plain_backend
from quire.attn_ops.step import StepLimits, current_step
from quire.attn_ops.vendor import by_token, refuse

CAPABILITIES = AttentionCapabilities(
    devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_dims=lambda d, dv: max(d, dv) <= 256, head_dims_note="up to 256", softcap=True,
    cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
USAGE = (f"{NAME}:TOKENS:DENSE_BELOW:CHANNELS:FILE: an approximation. Decodes over TOKENS keys of sequences longer than "
         f"DENSE_BELOW; FILE is from `quire calibrate`. {NAME}:TOKENS:DENSE_BELOW:all needs no file")


def _prepare(*tables: Any) -> list[Tensor]:
    return list(by_token(*tables[:4]))


def _prepare_fake(slot_mapping: Tensor, block_table: Tensor, *others: Any) -> list[Tensor]:
    tokens = slot_mapping.shape[0]
    return [block_table.new_empty(tokens, block_table.shape[1]), block_table.new_empty(tokens, dtype=torch.int32)]


PREPARE = define_prepare(NAME, _prepare, _prepare_fake)  # padding tokens have no keys, and so an output of 0


class State:
    """The labels of every key in a cache, by the address of the layer's key cache: the op is given no layer."""

    def __init__(self, options: Options, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> None:
        self.options, self.cache, self.layers = options, cache, dict[int, LayerLabels]()
        self.channels: dict[int, Tensor] = {}  # of each layer, on the device: nothing is copied there in a CUDA graph
        cache.beside[NAME] = {}
        for site in sites:
            self.of(cache.of_layer(site.layer)[0])

    def of(self, k_cache: Tensor) -> LayerLabels:
        """The labels of this key cache. Those of a copy (opcheck makes some) are made anew, where one layer leaves no doubt."""
        if k_cache.data_ptr() in self.layers:
            return self.layers[k_cache.data_ptr()]
        found = [i for i, k in enumerate(self.cache.k) if k.data_ptr() == k_cache.data_ptr()]
        if not found and self.cache.num_layers > 1:
            raise RuntimeError(f"{NAME}: no layer of the step's KV cache is at this address; give the op the cache's own "
                               "tensors")
        layer = self.cache.layer_ids[found[0] if found else 0]
        if layer not in self.channels:
            self.channels[layer] = self.options.of_layer(layer, *k_cache.shape[2:]).to(k_cache.device, torch.int32)
        channels, own = self.channels[layer], self.options.ranked is not None
        made = LayerLabels(labels_of(k_cache, channels).contiguous() if own else k_cache, channels, own)
        if found:
            self.layers[k_cache.data_ptr()] = made
            if own:
                self.cache.beside[NAME][layer] = made.labels
        return made


def backend(name: str, options: Options, decode: Callable[..., Tensor] | None = None) -> AttentionBackend:
    """The backend of these options. ``decode``: None: in Triton kernels on a GPU, else in plain PyTorch."""

    def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                        v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                        seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                        softcap: float | None, chunk: int | None) -> Tensor:
        refuse(NAME, CAPABILITIES, k_scale, window=window, chunk=chunk, sinks=sinks)
        step = current_step()
        if step is None or name not in step.states:
            raise RuntimeError(f"{name} keeps labels beside the KV cache: run it inside `with quire.step(...)`")
        layer = step.states[name].of(k_cache)
        tables = (slot_mapping, block_table, query_start_loc, seq_lens)
        if q.shape[0] > seq_lens.shape[0]:
            out = plain_backend(q.device.type).op(q, k, v, k_cache, v_cache, None, None, *tables, None, [], scale=scale,
                                                  window=None, softcap=softcap, chunk=None)
            layer.store(k_cache, slot_mapping)
            return out
        store_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
        layer.store(k_cache, slot_mapping)
        if not q.shape[0]:
            return q.new_empty(0, q.shape[1], v_cache.shape[3])
        table, lens = prepared or by_token(*tables)
        with host.on_device(q.device):
            run = decode or (decode_triton if q.is_cuda else decode_eager)
            return run(q, k_cache, v_cache, layer, table, lens, options, scale, softcap)

    return AttentionBackend(
        name=name,
        capabilities=CAPABILITIES,
        available=lambda device: None, op=define_paged_op(op_name(name), paged_attention),
        make_state=functools.partial(State, options), prepare=PREPARE, packages=("triton",), every_step=True,
        page_bytes=None if options.channels is None else lambda site, page_size: (
            page_size * site.num_kv_heads * (options.channels or 0) * site.dtype.itemsize),
        approximate=f"decodes over {options.tokens} keys of sequences longer than {options.limit} tokens")


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend of such a name. Raises ValueError for another form, numbers that are not positive, or a file that does not
    hold channels."""
    _, _, rest = name.partition(":")
    tokens, dense_below, channels, file = [*rest.split(":", 3), "", "", "", ""][:4]
    every = channels == "all"
    labels = not file if every else channels.isdigit() and int(channels) and file
    if not (labels and tokens.isdigit() and dense_below.isdigit() and int(tokens)):
        raise ValueError(f"attention={name!r}: write {USAGE}")
    if every:
        return backend(name, Options(int(tokens), int(dense_below)))
    if not Path(file).is_file():
        raise ValueError(f"attention={name!r}: there is no file {file}; `quire calibrate --out {file}` makes it")
    try:
        ranked = {int(layer): rows for layer, rows in json.loads(Path(file).read_text())["channels"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"attention={name!r}: {file} is not a file of `quire calibrate`: {type(error).__name__}: {error}"
                         ) from error
    return backend(name, Options(int(tokens), int(dense_below), int(channels), ranked))


FAMILY = BackendFamily(NAME, USAGE, make=make)

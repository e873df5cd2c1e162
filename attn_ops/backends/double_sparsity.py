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
from dataclasses import dataclass
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
    UnsupportedAttention,
    define_paged_op,
    define_prepare,
)
from quire.attn_ops.composite import op_name
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, Strides
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_store import has_kernel, store_kv
from quire.attn_ops.ops.merge_state import merge_states_triton
from quire.attn_ops.registry import plain_backend
from quire.attn_ops.step import StepLimits, current_step
from quire.attn_ops.vendor import by_token

NAME = "double_sparsity"
SCORE_BYTES = 256 << 20  # of the approximate scores, and of the candidates among them, that are held at a time
CAPABILITIES = AttentionCapabilities(
    devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_dims=lambda d, dv: max(d, dv) <= 256, head_dims_note="up to 256", softcap=True,
    cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
USAGE = (f"{NAME}:TOKENS:DENSE_BELOW:CHANNELS:FILE: an approximation. Decodes over TOKENS keys of sequences longer than "
         f"DENSE_BELOW; FILE is from `quire calibrate`. {NAME}:TOKENS:DENSE_BELOW:all needs no file")


@dataclass(frozen=True)
class Options:
    """``channels`` per label, None: all; ``ranked``: layer -> key heads' channels, most important first."""

    tokens: int
    dense_below: int
    channels: int | None = None
    ranked: dict[int, list[list[int]]] | None = None

    @property
    def limit(self) -> int:
        """The longest sequence that is attended exactly."""
        return max(self.tokens, self.dense_below)

    def of_layer(self, layer: int, heads: int, dim: int) -> Tensor:
        """(Hkv, CHANNELS) int64. Raises UnsupportedAttention if the file is of another model."""
        if self.ranked is None or self.channels is None:
            return torch.arange(dim).repeat(heads, 1)
        rows = self.ranked.get(layer)
        if rows is None or len(rows) != heads or any(sorted(r) != list(range(dim)) for r in rows):
            have = "no such layer" if rows is None else f"{len(rows)} heads of {len(rows[0])} channels"
            raise UnsupportedAttention(
                f"{NAME}: layer {layer} has {heads} key heads of {dim} channels, the file has {have}: it was made from another "
                "model. Run `quire calibrate` on this one")
        if self.channels > dim:
            raise UnsupportedAttention(f"{NAME}: {self.channels} channels of keys that have {dim}")
        return torch.tensor([r[: self.channels] for r in rows])


@dataclass(frozen=True)
class LayerLabels:
    """labels: (num_pages, page_size, Hkv, CHANNELS), or the key cache itself; channels: (Hkv, CHANNELS) int32."""

    labels: Tensor
    channels: Tensor
    own: bool  # labels are not the key cache

    def store(self, k_cache: Tensor, slot_mapping: Tensor) -> None:
        """The labels of keys that are in the cache already. Slot -1 may write to the null page, which is never read."""
        if self.own and has_kernel(k_cache.device.type):
            self.store_triton(k_cache, slot_mapping)
        elif self.own:
            slot = slot_mapping.clamp_min(0)
            page, offset = slot // k_cache.shape[1], slot % k_cache.shape[1]
            self.labels[page, offset] = labels_of(k_cache[page, offset], self.channels)

    def store_triton(self, k_cache: Tensor, slot_mapping: Tensor) -> None:
        if slot_mapping.numel():
            kv_heads, channels = self.channels.shape
            launch(host.kernel_module("kernels.sparse_decode").store_labels_kernel, (len(slot_mapping), kv_heads), k_cache,
                   self.labels, self.channels, slot_mapping, channels, k_cache.shape[1], Strides(*k_cache.stride()[:3]),
                   Strides(*self.labels.stride()[:3]), num_warps=1)


def labels_of(keys: Tensor, channels: Tensor) -> Tensor:
    """(..., Hkv, D), (Hkv, C) -> (..., Hkv, C)."""
    return keys.gather(-1, channels.long().expand(*keys.shape[:-2], *channels.shape))


def choose_eager(q: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Positions (T, H, n) of the keys that each query head attends to, and which of them count (T, H, n). Of keys with equal
    scores the first are chosen."""
    page_size, heads = layer.labels.shape[1], q.shape[1]
    table = table[:, : max(1, -(-int(lens.max()) // page_size))].long()
    labels = layer.labels[table].flatten(1, 2).repeat_interleave(heads // layer.labels.shape[2], 2)  # (T, L, H, C)
    query = labels_of(q, layer.channels.repeat_interleave(heads // layer.channels.shape[0], 0))
    scores = torch.einsum("thc,tlhc->thl", query.float(), labels.float())
    dense = (lens <= options.limit)[:, None, None]
    live = torch.arange(scores.shape[2], device=q.device) < lens[:, None, None]
    scores = scores.masked_fill(dense, 0.0).masked_fill(~live, float("-inf"))
    positions = scores.sort(dim=2, descending=True, stable=True).indices[..., : options.limit]  # NaN first
    rank = torch.arange(positions.shape[2], device=q.device)
    return positions, (positions < lens[:, None, None]) & (dense | (rank < options.tokens))


def decode_eager(q: Tensor, k_cache: Tensor, v_cache: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor, options: Options,
                 scale: float, softcap: float | None) -> Tensor:
    """The definition: each of q (T, H, D) is the last token of a sequence of lens (T,) tokens on pages table (T, W)."""
    positions, keep = choose_eager(q, layer, table, lens, options)
    tokens, heads, count = positions.shape
    page = table.long().gather(1, (positions // k_cache.shape[1]).flatten(1)).view(tokens, heads, count)
    kv_head = torch.arange(heads, device=q.device)[:, None] // (heads // k_cache.shape[2])
    keys, values = (c[page, positions % c.shape[1], kv_head].float() for c in (k_cache, v_cache))  # (T, H, n, D)
    scores = scale * (keys @ q.float().unsqueeze(-1))[..., 0]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~keep, float("-inf")), -1)
    weights = weights.masked_fill(~keep.any(-1, keepdim=True), 0.0)  # no key at all: padding
    return (weights.unsqueeze(2) @ values.masked_fill(~keep[..., None], 0.0))[:, :, 0].to(q.dtype)


def choose_triton(q: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor, options: Options) -> Tensor:
    """Positions (T, H, TOKENS) int32 of the keys that each query head attends to, in no order: those of ``choose_eager``, up to
    the rounding of float32 sums. Of a token that is attended exactly, memory may hold anything."""
    tokens, heads, _ = q.shape
    labels, (kv_heads, channels), page_size = layer.labels, layer.channels.shape, layer.labels.shape[1]
    width, limit = table.shape[1] * page_size, options.limit
    picked, group = min(options.tokens, width), heads // kv_heads
    if width <= limit:  # the block table has no room for a sequence that is not attended exactly
        return torch.empty(tokens, heads, picked, dtype=torch.int32, device=q.device)
    block = max(16, 4096 // host.next_power_of_2(group, 16)) if q.dtype.itemsize == 2 else 64
    scores = torch.empty(tokens, heads, width, dtype=torch.int32, device=q.device)
    launch(host.kernel_module("kernels.sparse_decode").label_scores_kernel, (tokens, kv_heads, -(-width // block)), q, labels,
           layer.channels, table, lens, scores, q.stride()[:2], table.stride(0), width, limit, group, channels,
           page_size, Strides(*labels.stride()[:3]), min(64, host.next_power_of_2(channels, 16)), block, num_warps=4)
    return host.kernel_module("kernels.select").largest(scores, lens, picked, limit)


def decode_triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor,
                  options: Options, scale: float, softcap: float | None) -> Tensor:
    """``decode_eager`` in three kernels, and one that merges; reads nothing on the host, and shapes follow from shapes."""
    caches = Caches(k_cache, v_cache, None, None)
    host.check_cache_strides(f"the {NAME} backend", caches)
    q = host.rows_contiguous(q)
    tokens, heads, dim = q.shape
    dim_v, half = v_cache.shape[3], q.dtype.itemsize == 2
    width, limit = table.shape[1] * k_cache.shape[1], options.limit
    block = (64 if max(dim, dim_v) <= 128 else 32) if half else 16
    # At most three programs for each multiprocessor, as many as fit there, of at least four steps each.
    splits = max(1, min(3 * host.num_sms(q.device) // (tokens * heads), min(limit, width) // (4 * block)))
    out = torch.empty(tokens, splits, heads, dim_v, dtype=torch.float32 if splits > 1 else q.dtype, device=q.device)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device) if splits > 1 else None
    at_once = max(1, SCORE_BYTES // (heads * width * 12))
    for begin in range(0, tokens, at_once):
        part = slice(begin, min(begin + at_once, tokens))
        listed = choose_triton(q[part], layer, table[part], lens[part], options)
        launch(host.kernel_module("kernels.sparse_decode").attend_listed_kernel, (len(listed) * heads, splits), q[part],
               k_cache, v_cache, table[part], lens[part], listed, out[part], None if lse is None else lse[part], q.stride()[:2],
               table.stride(0), listed.shape[2], limit, heads, scale, softcap, heads // k_cache.shape[2],
               host.cache_layout(caches), block, 4 if half else 1, num_warps=4)
    return out[:, 0] if lse is None else merge_states_triton(out, lse, q.dtype)[0]


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
        CAPABILITIES.refuse(NAME, k_scale, window=window, chunk=chunk, sinks=sinks)
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

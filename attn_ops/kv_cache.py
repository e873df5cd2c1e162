"""The paged KV cache: one K and one V tensor per layer, divided into pages of ``page_size`` tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite, dtype_name
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES, KVScales, check_kv_scales, is_fixed
from quire.attn_ops.metadata.layout import KVCacheLayoutType as Layout
from quire.attn_ops.metadata.layout import get_kv_cache_layout, is_valid_kv_cache_layout

SiteFinder = Callable[[Any], list[AttentionSite]]
Finder = TypeVar("Finder", bound=Callable[..., list[AttentionSite]])
site_finders: list[SiteFinder] = []


def register_site_finder(find: Finder) -> Finder:
    """Decorator: ``PagedKVCache.for_model`` finds a model's attention sites with ``find``; the last one registered is used."""
    site_finders.append(find)
    return find


class PagedKVCache:
    """Keys and values of all layers, by page.

    ``k[i]`` is (num_pages, page_size, Hkv, D) and ``v[i]`` (num_pages, page_size, Hkv, Dv) for the i-th attention layer: the
    *logical* shape. In memory ``layout`` "NHD" has that order, "HND" the heads outside the tokens of a page; kernels read the
    strides. Each tensor is its own allocation: slices of one storage, passed to a compiled graph, make Inductor copy all of it.
    Page 0 is the null page; see NOTE [Padding].

    With a quantized dtype (int8, float8_e4m3fn, float8_e5m2) ``k`` and ``v`` hold codes, and ``k_scale[i]``, ``v_scale[i]``
    (num_pages, page_size, Hkv) float32 their scales (``attn_ops/kv_quant.py``), with the heads outside the tokens in memory in
    either layout: a kernel reads the scales of one head. With ``kv_scales`` each is one number, (1, 1, 1), which nothing
    changes. Else both lists hold None. In a latent layer (MLA, ``attn_ops/mla.py``) a token has one key of rank + R numbers,
    and ``v[i]`` is a view of the first rank of them: ``of_layer`` gives None for it. Quantized, ``k_scale[i]`` is that of
    these, and ``v_scale[i]`` of the other R. Layers may have page numbers of their own: those with a window need fewer pages
    (``graph_runner/window_pages.py``).

    Args:
        num_pages: the null page included.  layer_pages: pages of each layer, where they differ.
        num_kv_heads, head_dim, head_dim_v: Hkv, D, Dv; an int, or one per layer. head_dim_v defaults to head_dim.
        layout: ``get_kv_cache_layout()`` by default.
        layer_ids: the model's own numbers of the layers, in order; default 0..num_layers-1.
        latent: whether values are the first head_dim_v numbers of the keys; a bool, or one per layer.
        kv_sources: of layers that attend to an earlier layer's keys and values: the layer whose tensors they have.
        kv_scales: fixed scales of an fp8 cache: a number, or {layer: (of keys, of values)} for each layer with tensors of its
            own. None: a scale for each token and key head.

    Raises ValueError for a size, a list or a dtype that is not possible, a latent layer that has more than one key head, or
    values longer than keys, a layer whose source is not an earlier one of the same sizes, and fixed scales of another dtype, of
    other layers, of a latent layer, or that are not positive.
    """

    def __init__(self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int | Sequence[int],
                 head_dim: int | Sequence[int], head_dim_v: int | Sequence[int] | None = None, dtype: torch.dtype,
                 device: torch.device | str, layout: Layout | None = None, layer_ids: Sequence[int] | None = None,
                 latent: bool | Sequence[bool] = False, layer_pages: Sequence[int] | None = None,
                 kv_sources: Mapping[int, int] | None = None, kv_scales: KVScales | None = None) -> None:
        for fewest in (num_pages, *(layer_pages or ())):
            if fewest < 2:
                raise ValueError(f"a paged KV cache needs at least 2 pages (page 0 is the null page), got num_pages={fewest}")
        self.layer_pages = _per_layer("layer_pages", num_pages if layer_pages is None else layer_pages, num_layers)
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        layout = get_kv_cache_layout() if layout is None else layout
        if not is_valid_kv_cache_layout(layout):
            raise ValueError(f"layout must be 'NHD' or 'HND', got {layout!r}")
        if dtype not in QUANTIZED_KV_DTYPES and not (dtype.is_floating_point and dtype.itemsize >= 2):
            raise ValueError(f"a KV cache of {dtype_name(dtype)} is not possible: give the model's own dtype or one of the "
                             f"quantized ones, {', '.join(sorted(map(dtype_name, QUANTIZED_KV_DTYPES)))}")
        heads = _per_layer("num_kv_heads", num_kv_heads, num_layers)
        dims = _per_layer("head_dim", head_dim, num_layers)
        dims_v = dims if head_dim_v is None else _per_layer("head_dim_v", head_dim_v, num_layers)
        self.layer_ids = list(range(num_layers)) if layer_ids is None else list(layer_ids)
        if len(self.layer_ids) != num_layers:
            raise ValueError(f"layer_ids has {len(self.layer_ids)} entries for {num_layers} layers")
        self.num_layers, self.num_pages, self.page_size, self.layout = num_layers, num_pages, page_size, layout
        self.dtype, self.device = dtype, torch.device(device)
        self.latent = [latent] * num_layers if isinstance(latent, bool) else list(latent)
        for h, d, d_v, is_latent in zip(heads, dims, dims_v, self.latent, strict=True):
            if is_latent and (h != 1 or d_v > d):
                raise ValueError(f"a latent layer has one key head, and values that are part of its keys; got {h} heads of "
                                 f"{d}/{d_v}")
        self._index = {layer: i for i, layer in enumerate(self.layer_ids)}
        self.kv_sources = dict(kv_sources or {})
        sizes = list(zip(self.layer_pages, heads, dims, dims_v, self.latent, strict=True))
        self.kv_scales: dict[int, tuple[float, float]] | None = None
        if kv_scales is not None:
            if any(self.latent):
                raise ValueError("kv_scales: latent layers (MLA) have a scale for each token; leave kv_scales out")
            self.kv_scales = check_kv_scales(kv_scales, dtype, [i for i in self.layer_ids if i not in self.kv_sources])
        self.k, self.v = list[Tensor](), list[Tensor]()
        self.k_scale, self.v_scale = list[Tensor | None](), list[Tensor | None]()
        for i, (n, h, d, d_v, is_latent) in enumerate(sizes):
            if (at := self._index[self._source(i, sizes)]) != i:
                for tensors in (self.k, self.v, self.k_scale, self.v_scale):
                    tensors.append(tensors[at])  # type: ignore[arg-type]
                continue
            self.k.append(self._allocate(n, h, d))
            self.v.append(self.k[i][..., :d_v] if is_latent else self._allocate(n, h, d_v))
            fixed = (None, None) if self.kv_scales is None else self.kv_scales[self.layer_ids[i]]
            self.k_scale.append(self._allocate_scale(n, h, fixed[0]))
            self.v_scale.append(self._allocate_scale(n, h, fixed[1]))
        self.beside: dict[str, dict[int, Tensor]] = {}  # by backend and layer: what it keeps of keys, (num_pages, ...)

    def _source(self, i: int, sizes: Sequence[Any]) -> int:
        """The layer whose tensors the i-th one has: itself, if it has its own. Raises ValueError."""
        layer = self.layer_ids[i]
        source = self.kv_sources.get(layer, layer)
        at = self._index.get(source, i + 1)
        if source != layer and (at >= i or source in self.kv_sources or sizes[at] != sizes[i]):
            raise ValueError(f"layer {layer} cannot have the keys and values of layer {source}: that is not an earlier layer "
                             "with a cache of its own and the same pages, heads and head dims")
        return source

    @property
    def quantized(self) -> bool:
        return self.dtype in QUANTIZED_KV_DTYPES

    @property
    def fixed_scale(self) -> bool:
        """Whether each layer has one fixed scale for keys and one for values."""
        return self.kv_scales is not None

    def _allocate_scale(self, num_pages: int, heads: int, fixed: float | None) -> Tensor | None:
        if not self.quantized:
            return None
        if fixed is not None:
            return torch.full((1, 1, 1), fixed, dtype=torch.float32, device=self.device)
        return torch.zeros(num_pages, heads, self.page_size, dtype=torch.float32, device=self.device).transpose(1, 2)

    def _allocate(self, num_pages: int, heads: int, dim: int) -> Tensor:
        # Zeros, not empty: a kernel may load (and mask out) the rest of a page, and 0 * NaN would still be NaN.
        if self.layout == "NHD":
            return torch.zeros(num_pages, self.page_size, heads, dim, dtype=self.dtype, device=self.device)
        pages = torch.zeros(num_pages, heads, self.page_size, dim, dtype=self.dtype, device=self.device)
        return pages.transpose(1, 2)

    @classmethod
    def for_sites(cls, sites: Sequence[AttentionSite], *, num_pages: int, page_size: int = 16, device: torch.device | str,
                  dtype: torch.dtype | None = None, layout: Layout | None = None, window_pages: int | None = None,
                  kv_scales: KVScales | None = None) -> PagedKVCache:
        """A cache for the attention sites of a model, as ``quire.explain`` lists them: MLA layers are latent. ``window_pages``:
        of layers with a window or chunk, the null page included; num_pages by default. ``kv_scales``: see PagedKVCache."""
        if not sites:
            raise ValueError("no attention sites: there is nothing to cache")
        heads, dims, dims_v = zip(*map(_entry, sites), strict=True)
        return cls(
            num_layers=len(sites), num_pages=num_pages, page_size=page_size, num_kv_heads=heads, head_dim=dims,
            head_dim_v=dims_v, dtype=dtype or sites[0].dtype, device=device, layout=layout,
            layer_ids=[s.layer for s in sites], latent=[s.latent is not None for s in sites],
            layer_pages=[window_pages if window_pages is not None and s.bounded else num_pages for s in sites],
            kv_sources={s.layer: s.kv_source for s in sites if s.kv_source is not None}, kv_scales=kv_scales,
        )

    @classmethod
    def for_model(cls, model: Any, *, num_pages: int, page_size: int = 16, dtype: torch.dtype | None = None,
                  device: torch.device | str | None = None, layout: Layout | None = None, latent: bool = False,
                  kv_scales: KVScales | None = None) -> PagedKVCache:
        """A cache for ``model``: its attention sites are found by tracing it (nothing is computed). ``latent``: latent vectors
        for MLA layers, for compiled models and backends that have MLA. ``kv_scales``: see PagedKVCache. Raises
        UnsupportedAttention if quire cannot serve the model."""
        if not site_finders:
            raise RuntimeError("PagedKVCache.for_model needs quire's capture; use quire.PagedKVCache")
        if device is None:
            device = next(model.parameters()).device
        sites = site_finders[-1](model)
        return cls.for_sites(sites if latent else [s.dense for s in sites], num_pages=num_pages, page_size=page_size,
                             dtype=dtype, device=device, layout=layout, kv_scales=kv_scales)

    def index(self, layer: int) -> int:
        """Position in ``k`` and ``v`` of the layer with the model's number ``layer``."""
        if layer not in self._index:
            raise ValueError(f"the KV cache has no layer {layer}; its layers are {self.layer_ids}")
        return self._index[layer]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(k, v, k_scale, v_scale) of that layer, in the order of a paged op's arguments; v None for a latent layer."""
        i = self.index(layer)
        return self.k[i], None if self.latent[i] else self.v[i], self.k_scale[i], self.v_scale[i]

    def is_latent(self, layer: int) -> bool:
        return self.latent[self.index(layer)]

    def check(self, site: AttentionSite) -> None:
        """Raises ValueError unless the layer of ``site`` is in the cache, with its key heads and head dims."""
        i = self.index(site.layer)
        heads, dim = self.k[i].shape[2:]
        if (found := (heads, dim, self.v[i].shape[3])) != _entry(site):
            raise ValueError(f"layer {site.layer} of the KV cache has {found[0]} key heads of {found[1]}/{found[2]}, and the "
                             f"model's needs {site.needs()}; make the cache with PagedKVCache.for_model")

    def copy_pages(self, source: Tensor, target: Tensor, layers: Sequence[int] | None = None) -> None:
        """Copy pages ``source`` to pages ``target`` of these layers (of all by default), both (n,) int64 on the cache's device,
        with their scales and what backends keep beside them. All are read before any is written."""
        chosen = self.layer_ids if layers is None else layers
        chosen = list(dict.fromkeys(self.kv_sources.get(layer, layer) for layer in chosen))
        kept = [tensors[layer] for tensors in self.beside.values() for layer in chosen if layer in tensors]
        for t in (*(t for layer in chosen for t in self.of_layer(layer)), *kept):
            if t is not None and not is_fixed(t):
                codes = t.view(torch.uint8) if t.element_size() == 1 else t  # float8 cannot be indexed
                codes.index_copy_(0, target, codes.index_select(0, source))

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, scales included."""
        tensors = [t for layer in self.layer_ids if layer not in self.kv_sources for t in self.of_layer(layer)]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def beside_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for tensors in self.beside.values() for t in tensors.values())

    def __repr__(self) -> str:
        scales = "" if not self.quantized else " and a fixed scale per layer" if self.fixed_scale else " and scales"
        return (f"PagedKVCache({self.num_layers} layers, {self.num_pages} pages of {self.page_size}, {self.layout}, "
                f"{dtype_name(self.dtype)}{scales}, {self.device}, {self.num_bytes / 2**20:.1f} MiB)")


def bytes_per_page(sites: Sequence[AttentionSite], page_size: int, dtype: torch.dtype | None = None, fixed_scale: bool = False
                   ) -> int:
    """Bytes of one page over all layers, scales included; keys and values that layers share count once."""
    return page_size * sum(token_bytes(s, dtype, fixed_scale) for s in sites if s.kv_source is None)


def token_bytes(site: AttentionSite, dtype: torch.dtype | None = None, fixed_scale: bool = False) -> int:
    """Bytes of one token in one layer, scales included."""
    heads, dim, dim_v = _entry(site)
    return heads * vector_bytes(dim, 0 if site.latent is not None else dim_v, dtype or site.dtype, fixed_scale)


def _entry(site: AttentionSite) -> tuple[int, int, int]:
    """What a token of one layer is in the cache: key heads, and the dims of a key and a value."""
    if site.latent is not None:
        return 1, sum(site.latent), site.latent.rank
    return site.num_kv_heads, site.head_dim, site.head_dim_v


def vector_bytes(head_dim: int, head_dim_v: int, dtype: torch.dtype, fixed_scale: bool = False) -> int:
    """Bytes per token and KV head in a cache of ``dtype``: a key and a value, with their scales unless these are fixed."""
    scales = 2 * torch.float32.itemsize if dtype in QUANTIZED_KV_DTYPES and not fixed_scale else 0
    return (head_dim + head_dim_v) * dtype.itemsize + scales


def _per_layer(name: str, value: int | Sequence[int], num_layers: int) -> list[int]:
    values = [value] * num_layers if isinstance(value, int) else [int(v) for v in value]
    if len(values) != num_layers or min(values, default=0) < 1:
        raise ValueError(f"{name} must be a positive int or {num_layers} of them, got {value}")
    return values


def pages_for(num_tokens: int, page_size: int) -> int:
    return math.ceil(num_tokens / page_size)

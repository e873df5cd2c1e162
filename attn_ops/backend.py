"""What an attention backend is: a frozen record, and the check that nothing a model needs is ignored.

A backend is five things: ``capabilities``, ``available``, the paged op, ``plan`` and ``prepare`` (see AttentionBackend). It
lives in one file, registers itself under the entry-point group ``quire.backends``, and nothing outside that file names it.

The paged op of every backend has one schema (PAGED_SCHEMA): it writes the step's new keys and values into the cache, then
attends each query to its sequence's pages. ``define_paged_op`` registers it, so a backend only writes the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.library import LIBRARY, define_op

PAGED_SCHEMA = (
    "(Tensor q, Tensor? k, Tensor? v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, "
    "Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor? sinks, Tensor[] prepared, *, "
    "float scale, int? window, float? softcap, int? chunk) -> Tensor"
)
#: The same with q and k as they are before the rotary embedding; see ``attn_ops/ops/rope.py`` for what is new. An option that has
#: its default is not handed on, so that an implementation may lack the last four (``AttentionBackend.rope_forms``).
ROPE_PAGED_SCHEMA = PAGED_SCHEMA.replace("Tensor? k, Tensor? v, ", (
    "Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm_weight, Tensor? k_norm_weight, float eps, ")).replace(
    ") ->", ", bool interleaved=False, bool half_tables=False, bool norm_after=False, float? norm_offset=None) ->")


class CudagraphSupport(IntEnum):
    """Which batches may be captured whole, in vLLM's terms; a model's level is the minimum over its backends."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class AttentionCapabilities:
    """What a backend can do. A feature not declared here is refused, never tried.

    Args:
        devices: torch device types.
        dtypes: of q, k and v.
        kv_dtypes: of the cache, beside the dtype of q.  kv_dtypes_note: why no others, in words, for messages.
        min_kv_compute_capability: of a CUDA device, for some of kv_dtypes.
        head_dims: predicate on (D, Dv).  head_dims_note: the same in words, for messages.
        page_sizes: predicate on tokens a page.  page_sizes_note: in words.
        layouts: memory layouts of the cache.
        min_compute_capability: of a CUDA device.
        window, softcap, sinks, chunk, non_causal: features of a site.
        mla, cross, encoder, cascade: kinds of attention no backend here has yet; declared so that `quire backends` says so.
        cudagraph_support: see CudagraphSupport.
        needs_plan: host work is due before every step and every replay.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    kv_dtypes_note: str = ""
    min_kv_compute_capability: Mapping[torch.dtype, tuple[int, int]] = field(default_factory=dict, hash=False)
    head_dims: Callable[[int, int], bool] = lambda d, dv: True
    head_dims_note: str = "any"
    page_sizes: Callable[[int], bool] = lambda p: True
    page_sizes_note: str = "any"
    layouts: frozenset[str] = frozenset({"NHD", "HND"})
    min_compute_capability: tuple[int, int] = (0, 0)
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    chunk: bool = False
    non_causal: bool = False
    mla: bool = False
    cross: bool = False
    encoder: bool = False
    cascade: bool = False
    cudagraph_support: CudagraphSupport = CudagraphSupport.NEVER
    needs_plan: bool = False

    def reasons_against(
        self, site: AttentionSite, *, device: torch.device, page_size: int | None = None,
        kv_dtype: torch.dtype | None = None, layout: str | None = None,
    ) -> list[str]:
        """Why this backend cannot serve ``site``; empty if it can."""
        why = []
        if device.type not in self.devices:
            why.append(f"runs on {listed(self.devices)}, not {device.type}")
        kv_dtype = kv_dtype or site.dtype
        if device.type == "cuda" and device.type in self.devices and torch.cuda.is_available():
            have = torch.cuda.get_device_capability(device)
            for what, need in (("", self.min_compute_capability), (f"KV cache dtype {dtype_name(kv_dtype)} ", (
                    self.min_kv_compute_capability.get(kv_dtype, (0, 0))))):
                if have < need:
                    why.append(f"{what}needs compute capability {need[0]}.{need[1]}, the GPU has {have[0]}.{have[1]}")
        if site.dtype not in self.dtypes:
            why.append(f"dtype {dtype_name(site.dtype)} (has {listed(map(dtype_name, self.dtypes))})")
        if kv_dtype not in (site.dtype, *self.kv_dtypes):
            have_kv = "the model's own dtype" + (f", {listed(map(dtype_name, self.kv_dtypes))}" if self.kv_dtypes else " only")
            note = f": {self.kv_dtypes_note}" if self.kv_dtypes_note else ""
            why.append(f"KV cache dtype {dtype_name(kv_dtype)} (has {have_kv}{note})")
        if not self.head_dims(site.head_dim, site.head_dim_v):
            why.append(f"head dims {site.head_dim}/{site.head_dim_v} (has {self.head_dims_note})")
        if page_size is not None and not self.page_sizes(page_size):
            why.append(f"page size {page_size} (has {self.page_sizes_note})")
        if layout is not None and layout not in self.layouts:
            why.append(f"KV layout {layout} (has {listed(self.layouts)})")
        for feature in ("window", "softcap", "chunk"):
            if getattr(site, feature) is not None and not getattr(self, feature):
                why.append(f"no {feature}")
        if site.sinks and not self.sinks:
            why.append("no sinks")
        if not site.causal and not self.non_causal:
            why.append("no non-causal attention")
        return why


@dataclass(frozen=True)
class AttentionBackend:
    """One attention backend.

    Args:
        name: what users write: ``attention="name"``.
        capabilities: see AttentionCapabilities.
        available: device -> None if usable on it in this process, else the reason in words, with what to do about it.
        op: the paged op (PAGED_SCHEMA), from ``define_paged_op``.
        rope_op: the paged op with the rotary embedding in front (ROPE_PAGED_SCHEMA), if the kernels do that better than a
            kernel before them (``attn_ops/ops/rope.py``).
        rope_forms: rope_op honours the options of every RopeForm (``attn_ops/ops/rope.py``). False: it is called for PLAIN
            only, without options, and rope_kv_write rotates for the other forms.
        make_state: (sites, cache, limits) -> the backend's own state for one engine or step (workspaces, planned kernels),
            or None for a backend that keeps none. ``limits`` is a StepLimits.
        plan: (metadata, step) host work before a forward or a replay, outside the graph; once a step, never once a layer.
            ``step`` is a Step: it holds the state, and says whether a CUDA graph is being captured or replayed. Must not
            allocate on the device when replaying.
        prepare: an op ``(Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, int page_size) ->
            Tensor[]`` recorded in the graph once a forward; what it returns reaches every layer as ``prepared``. Device
            work only: no sync, no shape that depends on data.
        priority: place in the walk of ``attention="auto"``, by device type; lower is tried first, missing is not tried.
        packages: distributions, beside torch, whose versions its speed hangs on: times measured with others do not count.
    """

    name: str
    capabilities: AttentionCapabilities
    available: Callable[[torch.device], str | None]
    op: Any
    rope_op: Any | None = None
    rope_forms: bool = False
    make_state: Callable[..., Any] | None = None
    plan: Callable[..., None] | None = None
    prepare: Any | None = None
    priority: dict[str, int] | None = None
    packages: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[Any, ...]:
        """The ops that attend: ``op``, and ``rope_op`` if there is one."""
        return (self.op,) if self.rope_op is None else (self.op, self.rope_op)


class UnsupportedAttention(ValueError):
    """A model, or one attention site of it, needs what cannot be honoured. The message lists what, and why not."""


def define_paged_op(name: str, impl: Callable[..., torch.Tensor], devices: Iterable[str] = ("CPU", "CUDA"),
                    rope: bool = False, launches: bool = False) -> Any:
    """Register ``quire::<name>_paged_attention`` with PAGED_SCHEMA and its fake; return the op overload. With ``rope`` it is
    ``quire::<name>_rope_paged_attention`` with ROPE_PAGED_SCHEMA.

    ``impl`` takes q (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv), the caches of the layer with their scales, the metadata
    tensors and ``prepared``; it mutates caches and scales and nothing else, and returns (T, H, Dv). k and v None: nothing
    is written (the layer shares another's cache). k_scale and v_scale None: the caches hold keys and values as they are;
    else codes, and every key and value is attended to as it reads back, the step's own included (``attn_ops/kv_quant.py``).
    ``launches`` is ``define_op``'s.
    """
    schema = f"{name}_rope_paged_attention{ROPE_PAGED_SCHEMA}" if rope else f"{name}_paged_attention{PAGED_SCHEMA}"
    keys = set(devices)
    op = define_op(schema, cpu=impl if "CPU" in keys else None, cuda=impl if "CUDA" in keys else None,
                   fake=_rope_paged_fake if rope else _paged_fake, launches=launches)
    for key in keys - {"CPU", "CUDA"}:
        LIBRARY.impl(op.name().removeprefix("quire::"), impl, key)
    return op


def _paged_fake(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor,
                v_cache: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])


def _rope_paged_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_norm: Any,
                     k_norm: Any, eps: float, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **kwargs: Any
                     ) -> torch.Tensor:
    return _paged_fake(q, k, v, k_cache, v_cache)


def listed(items: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, items))) or "none"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["AttentionBackend", "AttentionCapabilities", "CudagraphSupport", "PAGED_SCHEMA", "ROPE_PAGED_SCHEMA",
           "UnsupportedAttention", "define_paged_op", "dtype_name", "listed"]

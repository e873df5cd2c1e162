"""Attention backends: the page for authors of one.

A backend is an ``AttentionBackend`` record and a function, the paged op. The names that an author needs are in ``quire``;
``examples/backend`` is a whole backend in plain PyTorch::

    from quire import AttentionBackend, AttentionCapabilities, define_paged_op

    def paged_attention(q, k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table, query_start_loc, seq_lens,
                        sinks, prepared, *, scale, window, softcap, chunk): ...

    BACKEND = AttentionBackend("mine", AttentionCapabilities(devices=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16})),
                               available=lambda device: None, op=define_paged_op("mine", paged_attention))

CONTRIBUTING.md ("Adding a backend") says how it is registered and checked.

The paged op stores the step's keys and values, then attends each query to its sequence's pages and returns (T, H, Dv). T, B
and the other letters are those of ``attention.py``, the tensors those of ``metadata/core.py`` and ``kv_cache.py``:

=================  ==================================================================================================
q, k, v            (T, H, D), (T, Hkv, D), (T, Hkv, Dv), perhaps strided. k, v None: another layer with the same cache
                   has stored them
k_cache, v_cache   (pages, page_size, Hkv, D or Dv), in either layout: read the strides
k_scale, v_scale   (pages, page_size, Hkv) float32 for a quantized cache, else None. Every key and value is then attended
                   to as it reads back (``kv_quant.py``), those of this step too. (1, 1, 1): one fixed scale, not written
slot_mapping       (T,) int64; block_table (B, W), query_start_loc (B + 1,), seq_lens (B,) int32
sinks              (H,) or None
prepared           what ``prepare`` returned; [] without it
scale, ...         as in ``attention.py``
=================  ==================================================================================================

Rules:

* Declare only what the kernels honour. The op itself raises UnsupportedAttention for a feature that it lacks, and changes no
  input.
* Write the mapped slots and nothing else. See NOTE [Padding]: rows may be empty, padding tokens give zeros.
* Read nothing on the host in the op: host work belongs in ``plan``, which finds its state in ``current_step()``.
* For ``attention="auto"``, set ``priority`` for each device type, and ``packages`` to the distributions that the speed depends
  on: times that ``quire bench attention --save`` measured with other versions do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite, dtype_name
from quire.attn_ops.breaks import breakable
from quire.attn_ops.library import LIBRARY, define_op

PAGED_SCHEMA = (
    "(Tensor q, Tensor? k, Tensor? v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, "
    "Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor? sinks, Tensor[] prepared, *, "
    "float scale, int? window, float? softcap, int? chunk) -> Tensor"
)
#: The same with q and k before the rotary embedding (``attn_ops/ops/rope.py``). Options at their defaults are not passed on, so
#: an implementation may lack the last four (``AttentionBackend.rope_forms``).
ROPE_PAGED_SCHEMA = PAGED_SCHEMA.replace("Tensor? k, Tensor? v, ", (
    "Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm_weight, Tensor? k_norm_weight, float eps, ")).replace(
    ") ->", ", bool interleaved=False, bool half_tables=False, bool norm_after=False, float? norm_offset=None) ->")
#: Attention as a *state* (``attn_ops/ops/merge_state.py``): the paged op without window, chunk and sinks, that returns the
#: output and its log-sum-exp (T, H) float32, natural logarithm. Not ``causal``: every query sees all ``seq_lens`` keys of its
#: sequence, perhaps none or fewer than it has queries. A query without keys, as a padding token, gives 0 and -inf.
STATE_SCHEMA = PAGED_SCHEMA.replace("Tensor? sinks, ", "").replace(
    "int? window, float? softcap, int? chunk) -> Tensor", "float? softcap, bool causal) -> (Tensor, Tensor)")
#: What to do where a backend serves a quantized cache with fixed scales only.
FIXED_REMEDY = "it serves one fixed scale per layer: give kv_scales=, a number or {layer: (of keys, of values)}"
PREPARE_SCHEMA = (
    "(Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, int page_size) -> Tensor[]")


class CudagraphSupport(IntEnum):
    """Which batches may be captured whole, in vLLM's terms."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class AttentionCapabilities:
    """What a backend can do. A feature not declared here is refused, never tried.

    Args:
        devices: torch device types.  dtypes: of q, k and v.
        kv_dtypes: of the cache, besides the dtype of q.  kv_dtypes_note: why no others, for messages.
        fixed_scale_kv_dtypes: of a cache with one fixed scale per layer (``PagedKVCache(kv_scales=)``), whose codes of NaN must
            give NaN.
        min_compute_capability: of a CUDA device.  min_kv_compute_capability: the same for some dtypes of the cache.
        head_dims: predicate on (D, Dv).  heads: on (H, Hkv).  mla_dims: on (rank, R).  page_sizes: on tokens per
            page.  *_note: for messages.
        layouts: memory layouts of the cache.
        window, softcap, sinks, chunk, non_causal: features of a site.
        mla: MLA on the latent cache, with ``mla_op``.  latent_kv_dtypes: of kv_dtypes, those of a latent cache.
        lse: it has ``state_op``, so that parts of the keys can be attended to apart: shared prefixes, trees of drafts.
        cudagraph_support: the batches that a CUDA graph may hold. Padding rows of a graph are 0 tokens long for every backend
            (NOTE [Padding]); there is no fill value to choose. A backend whose kernels need a token clamps the lengths to 1.
        batch_invariant: a sequence's output does not depend, bit for bit, on the rest of its batch.
        any_batch: the op takes the batch from its tables alone, so that it may be called with another than the step's: at
            most as long in queries and sequences. Without a plan and a state only.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    kv_dtypes_note: str = ""
    fixed_scale_kv_dtypes: frozenset[torch.dtype] = frozenset()
    min_kv_compute_capability: Mapping[torch.dtype, tuple[int, int]] = field(default_factory=dict, hash=False)
    head_dims: Callable[[int, int], bool] = lambda d, dv: True
    head_dims_note: str = "any"
    heads: Callable[[int, int], bool] = lambda heads, kv_heads: True
    heads_note: str = "any"
    mla_dims: Callable[[int, int], bool] = lambda rank, rope: True
    mla_dims_note: str = "any"
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
    latent_kv_dtypes: frozenset[torch.dtype] = frozenset()
    lse: bool = False
    batch_invariant: bool = False
    any_batch: bool = False
    cudagraph_support: CudagraphSupport = CudagraphSupport.NEVER

    def reasons_against(self, site: AttentionSite, *, device: torch.device, page_size: int | None = None,
                        kv_dtype: torch.dtype | None = None, layout: str | None = None, fixed_scale: bool = False
                        ) -> list[str]:
        """Why this backend cannot serve ``site``; empty if it can. ``fixed_scale``: of a cache with fixed scales."""
        why, kv_dtype = list[str](), kv_dtype or site.dtype
        if device.type not in self.devices:
            why.append(f"runs on {listed(self.devices)}, not {device.type}")
        if old := self.reason_against_gpu(device):
            why.append(old)
        if old := self._too_old(device, self.min_kv_compute_capability.get(kv_dtype, (0, 0))):
            why.append(f"KV cache dtype {dtype_name(kv_dtype)} {old}")
        if site.dtype not in self.dtypes:
            why.append(f"dtype {dtype_name(site.dtype)} (has {listed(map(dtype_name, self.dtypes))})")
        if fixed_scale:
            if kv_dtype not in self.fixed_scale_kv_dtypes:
                why.append(f"KV cache of {dtype_name(kv_dtype)} with one fixed scale per layer, kv_scales (has "
                           f"{listed(map(dtype_name, self.fixed_scale_kv_dtypes))})")
        elif kv_dtype not in (site.dtype, *self.kv_dtypes):
            have_kv = "the model's own dtype" + (f", {listed(map(dtype_name, self.kv_dtypes))}" if self.kv_dtypes else " only")
            note = f": {self.kv_dtypes_note}" if self.kv_dtypes_note else ""
            remedy = f"; {FIXED_REMEDY}" if kv_dtype in self.fixed_scale_kv_dtypes else ""
            why.append(f"KV cache dtype {dtype_name(kv_dtype)} (has {have_kv}{note}{remedy})")
        if site.latent is not None:
            if not self.mla:
                why.append("no MLA on the latent cache")
            elif not self.mla_dims(*site.latent):
                why.append(f"MLA of {site.latent.rank}+{site.latent.rope} (has {self.mla_dims_note})")
            if fixed_scale:
                why.append("no latent cache with fixed scales")
            elif kv_dtype not in (site.dtype, *self.latent_kv_dtypes):
                why.append(f"no latent cache of {dtype_name(kv_dtype)}")
        elif not self.head_dims(site.head_dim, site.head_dim_v):
            why.append(f"head dims {site.head_dim}/{site.head_dim_v} (has {self.head_dims_note})")
        if not self.heads(site.num_heads, site.num_kv_heads):
            why.append(f"{site.num_heads} query heads and {site.num_kv_heads} key heads (has {self.heads_note})")
        if page_size is not None and not self.page_sizes(page_size):
            why.append(f"page size {page_size} (has {self.page_sizes_note})")
        if layout is not None and layout not in self.layouts:
            why.append(f"KV layout {layout} (has {listed(self.layouts)})")
        needed = [name for name in ("window", "softcap", "chunk") if getattr(site, name) is not None] + ["sinks"] * site.sinks
        why += [f"no {name}" for name in needed if not getattr(self, name)]
        if not site.causal and not self.non_causal:
            why.append("no non-causal attention")
        return why

    def refuse(self, name: str, k_scale: Tensor | None, **features: Any) -> None:
        """Raise UnsupportedAttention for arguments of a paged op, by the names of features, that are not declared."""
        if k_scale is not None or any(value is not None and not getattr(self, f) for f, value in features.items()):
            words = {"window": "windows", "softcap": "softcap", "chunk": "chunks", "sinks": "sinks"}
            *lacks, last = [*(word for f, word in words.items() if not getattr(self, f)), "quantized KV cache"]
            note = f": {self.kv_dtypes_note}" if self.kv_dtypes_note else ""
            raise UnsupportedAttention(f"the {name} backend has no {', '.join(lacks)}{' or ' if lacks else ''}{last}{note}")

    def reason_against_gpu(self, device: torch.device) -> str | None:
        """Why this CUDA device is too old, or None."""
        return self._too_old(device, self.min_compute_capability)

    def _too_old(self, device: torch.device, need: tuple[int, int]) -> str | None:
        if device.type != "cuda" or device.type not in self.devices or not torch.cuda.is_available():
            return None
        have = torch.cuda.get_device_capability(device)
        return f"needs compute capability {need[0]}.{need[1]}, the GPU has {have[0]}.{have[1]}" if have < need else None


@dataclass(frozen=True)
class ExpandedPart:
    """How a backend attends to MLA's expanded keys and values (``attn_ops/mla_prefill.py``) in steps of another backend.

    Args:
        takes: (site, device) -> whether its kernels take the heads of a site.
        time: PrefillTime (``attn_ops/tuning/prefill.py``) of it.
        make: (device) -> its state for one engine or step: ``begin()`` -> the ``mla_prefill.Faster`` of a step,
            ``try_short(site)`` runs a short prompt.
    """

    takes: Callable[[AttentionSite, torch.device], bool]
    time: Any
    make: Callable[[torch.device], Any]


@dataclass(frozen=True)
class PrefillPart:
    """How a backend serves the prompts of some steps, beside another that serves their decodes and all other steps
    (``attn_ops/long_prefill.py``).

    Args:
        ready: (sites, device, seconds) -> None if the kernels for prompts of these sites are compiled and load, else why not.
            It may compile what is missing, in other processes, for at most ``seconds``; with 0 it only looks.
        make_state: as of the backend; with this state ``plan`` and ``op`` leave out the sequences of one token at the head of a
            batch: their keys and values are stored, and their rows of the result hold anything.
        begin: (sites, device, seconds) -> None: start to compile what ``ready`` will wait for; optional.
        kv_dtypes: quantized caches of layers without a window that it serves by copies of the keys in the queries' dtype.
        expanded: for MLA layers, which the other backend serves; optional.
    """

    ready: Callable[[Sequence[AttentionSite], torch.device, float], str | None]
    make_state: Callable[..., Any]
    begin: Callable[[Sequence[AttentionSite], torch.device, float], None] | None = None
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    expanded: ExpandedPart | None = None


@dataclass(frozen=True)
class AttentionBackend:
    """One attention backend.

    Args:
        name: what users write: ``attention="name"``.
        available: device -> None if usable on it in this process, else the reason, with what to do about it.
        op: the paged op (PAGED_SCHEMA), from ``define_paged_op``. None for MLA only; head_dims accept nothing then.
        rope_op: the paged op with the rotary embedding in front (ROPE_PAGED_SCHEMA), for kernels that fuse it.
        mla_op: the paged op on the latent cache (``mla.py``), from ``define_mla_op``; with ``capabilities.mla``.
        state_op: attention as a state (STATE_SCHEMA), from ``define_state_op``; with ``capabilities.lse``. Needs no plan.
        varlen: attention over ragged sequences without a KV cache: what ``varlen_attention_eager`` (``attn_ops/ops/varlen.py``)
            does, without ``implementation``, which is then this backend's name. Raises ValueError for what it lacks.
        rope_forms: whether rope_op honours the options of every RopeForm (``attn_ops/ops/rope.py``). False: it is called for
            PLAIN only, without options, and rope_kv_write rotates for the other forms.
        make_state: (sites, cache, limits: StepLimits) -> the backend's state for one engine or step (workspaces, plans).
        plan: (metadata, step: Step) -> None, host work before a forward or a replay, outside the graph; once per step. Must
            not allocate on the device when replaying. Steps of one graph (``Step.number``) are all planned before the first of
            them: ``attn_ops/plans.py`` holds their plans.
        prepare: an op (PREPARE_SCHEMA), from ``define_prepare``, recorded in the graph once per forward; every layer gets the
            result as ``prepared``. Device work only: no sync, no shape that depends on data.
        priority: place in the order of ``attention="auto"``, by device type; lower is tried first, missing is not tried.
        packages: distributions, besides torch, that its speed depends on.
        verified: whether the kit has passed on the hardware that it is for. False: only its calls have been checked.
            verified_note: with which of its packages it has, where not with all.
        route: for a backend made of backends: site -> which of them serve it, as text.
        approximate: what its results leave out, for tables and logs; "": it is exact. Never chosen by "auto".
        every_step: it keeps data about the cached keys, so another backend cannot take some of the steps.
        page_bytes: (site, page_size) -> bytes that it keeps of each page of that layer in ``PagedKVCache.beside``; with
            ``every_step``.
        plans_windows: its plan takes ``Step.window_metadata``, where there are some, for sites with a window or chunk, so that
            these may have page numbers of their own. Without a plan that needs nothing.
        same_in_graphs: a captured step has the kernels and grids of an uncaptured one of the same shape, whatever its number of
            tokens and the length of its sequences (apart from MLA, and where ``without_graph`` gives two times). False: steps
            of more than about a thousand tokens are captured only on request, as their graphs may take the GPU longer.
        unrotated: it needs q before the rotary embedding: rope_op is used wherever the rotation is found.
        prefill: how it serves prompts beside another backend; None: whole steps only.
        plans_graphs: its plan works for steps that run as CUDA graphs too. False: there it does nothing, and what it needs on
            the device may be computed in the graph.
        takes_other_batches: the op takes other batches than the step's despite its plan and state, which it does not use then.
            With ``capabilities.any_batch``.
        warm_up: (sites, device, seconds) -> None, or what is not ready: work before an engine's first step, such as compiling
            kernels in other processes for at most ``seconds``.  begin_warm_up: starts it while a model is compiled.
        without_graph: (sites, device, state, query_lens, seq_lens) -> estimated microseconds of all layers' attention in a step
            with and without a CUDA graph; the state is its own, None without ``make_state``; the (B,) int arrays are on the
            host. Engines may run a step without its graph where that takes less.
        scratch_bytes: (sites, device, tokens) -> bytes, at most, that its op takes for a step without a CUDA graph whose
            sequences have ``tokens`` tokens, and not for one of padding alone, by which engines measure.
        expanded_time: PrefillTime of its own attention to MLA's expanded keys, for the heads with which it was measured.
    """

    name: str
    capabilities: AttentionCapabilities
    available: Callable[[torch.device], str | None]
    op: Any
    rope_op: Any | None = None
    mla_op: Any | None = None
    state_op: Any | None = None
    varlen: Callable[..., tuple[Tensor, Tensor]] | None = None
    rope_forms: bool = False
    make_state: Callable[..., Any] | None = None
    plan: Callable[..., None] | None = None
    prepare: Any | None = None
    priority: dict[str, int] | None = None
    packages: tuple[str, ...] = ()
    verified: bool = True
    verified_note: str = ""
    route: Callable[[AttentionSite], str] | None = None
    approximate: str = ""
    every_step: bool = False
    page_bytes: Callable[[AttentionSite, int], int] | None = None
    plans_windows: bool = False
    same_in_graphs: bool = False
    unrotated: bool = False
    prefill: PrefillPart | None = None
    plans_graphs: bool = True
    takes_other_batches: bool = False
    warm_up: Callable[[Sequence[AttentionSite], torch.device, float], str | None] | None = None
    begin_warm_up: Callable[[Sequence[AttentionSite], torch.device, float], None] | None = None
    without_graph: Callable[[Sequence[AttentionSite], torch.device, Any, np.ndarray, np.ndarray], tuple[float, float]
                            ] | None = None
    scratch_bytes: Callable[[Sequence[AttentionSite], torch.device, int], int] = lambda sites, device, tokens: 0
    expanded_time: Any = None

    def __post_init__(self) -> None:
        if self.approximate and self.priority:
            raise ValueError(f"attention backend {self.name!r} is approximate and has a priority: attention=\"auto\" is exact")
        for feature, op, what in (("mla", self.mla_op, "mla_op"), ("lse", self.state_op, "state_op")):
            if getattr(self.capabilities, feature) and op is None:
                raise ValueError(f"attention backend {self.name!r} declares {feature} and has no {what}")
        if self.page_bytes is not None and not self.every_step:
            raise ValueError(f"attention backend {self.name!r} keeps data of each page (page_bytes): it must see every step "
                             "(every_step)")

    def bytes_beside(self, site: AttentionSite, page_size: int) -> int:
        return 0 if self.page_bytes is None else self.page_bytes(site, page_size)

    def takes_prompts(self, site: AttentionSite, *, device: torch.device, **cache: Any) -> bool:
        """Whether it may serve the site's prompts beside another backend; of MLA, expanded keys and values, whatever the cache
        is. ``cache``: arguments of ``AttentionCapabilities.reasons_against``."""
        if site.latent is None:
            return not self.capabilities.reasons_against(site, device=device, **cache)
        expanded = None if self.prefill is None else self.prefill.expanded
        return expanded is not None and expanded.takes(site, device)

    def prepared(self, *tables: Any) -> list[Tensor]:
        """What ``prepare`` makes of the tables and the page size; [] without it."""
        return [] if self.prepare is None else list(self.prepare(*tables))

    @property
    def any_batch(self) -> bool:
        """Whether some layers may run on a part of the step's batch."""
        without = self.takes_other_batches or (self.plan is None and self.make_state is None)
        return self.capabilities.any_batch and without and not self.every_step

    def serves(self, site: AttentionSite) -> str:
        """What a site becomes, as text."""
        own = f"{self.name}_{'mla_' if site.latent is not None else ''}paged_attention"
        return own if self.route is None else self.route(site)

    @property
    def ops(self) -> tuple[Any, ...]:
        """The ops that attend."""
        return tuple(op for op in (self.op, self.rope_op, self.mla_op) if op is not None)


@dataclass(frozen=True)
class BackendFamily:
    """Backends that are made when their name is first used, registered as a backend is.

    Args:
        usage: the form of the names, for tables and messages.
        make: (name, get_backend) -> the backend. Raises ValueError for a name that is not of the form.
        matches: whether a name is one of the family's; None: if it is the family's, or begins with that and a colon.
        long_prefill: (prefill, rest) -> the name of the backend that serves by ``prefill`` the steps in which its prompts were
            measured faster, and all others by ``rest``.
        pair: (prefill, decode) -> the name of the backend that decodes by ``decode`` and serves all else by ``prefill``.
    """

    name: str
    usage: str
    _: KW_ONLY
    make: Callable[[str, Callable[[str], AttentionBackend]], AttentionBackend]
    matches: Callable[[str], bool] | None = None
    long_prefill: Callable[[str, str], str] | None = None
    pair: Callable[[str, str], str] | None = None

    def has(self, name: str) -> bool:
        return name.partition(":")[0] == self.name if self.matches is None else self.matches(name)


class UnsupportedAttention(ValueError):
    """A model, or one attention site of it, needs what cannot be honoured. The message lists what, and why not."""


def define_paged_op(name: str, impl: Callable[..., Tensor], devices: Iterable[str] = ("CPU", "CUDA"),
                    rope: bool = False, launches: bool = False) -> Any:
    """Register ``impl`` (see this module's docstring; it mutates the caches and scales and nothing else) as
    ``quire::<name>_paged_attention`` with PAGED_SCHEMA and its fake; return the op overload. ``devices``: dispatch keys.
    ``rope``: register ``quire::<name>_rope_paged_attention`` with ROPE_PAGED_SCHEMA instead. ``launches``: see
    ``define_op``."""
    schema = f"{name}_rope_paged_attention{ROPE_PAGED_SCHEMA}" if rope else f"{name}_paged_attention{PAGED_SCHEMA}"
    keys, fake = set(devices), _rope_paged_fake if rope else _paged_fake
    impl = breakable(impl, fake)
    op = define_op(schema, cpu=impl if "CPU" in keys else None, cuda=impl if "CUDA" in keys else None, fake=fake,
                   launches=launches)
    for key in keys - {"CPU", "CUDA"}:
        LIBRARY.impl(op.name().removeprefix("quire::"), impl, key)
    return op


def define_prepare(name: str, impl: Callable[..., list[Tensor]], fake: Callable[..., list[Tensor]], launches: bool = False
                   ) -> Any:
    """Register ``impl`` as ``quire::<name>_prepare`` with PREPARE_SCHEMA, for CPU and CUDA; return the op overload.
    ``launches``: see ``define_op``."""
    return define_op(f"{name}_prepare{PREPARE_SCHEMA}", cpu=impl, cuda=impl, fake=fake, launches=launches)


def define_state_op(name: str, impl: Callable[..., tuple[Tensor, Tensor]], launches: bool = False) -> Any:
    """Register ``impl`` as ``quire::<name>_attention_state`` with STATE_SCHEMA and its fake, for CPU and CUDA; return the op
    overload. ``launches``: see ``define_op``."""
    return define_op(f"{name}_attention_state{STATE_SCHEMA}", cpu=impl, cuda=impl, fake=_state_fake, launches=launches)


def _state_fake(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _paged_fake(q, *args, **kwargs), q.new_empty(q.shape[:2], dtype=torch.float32)


def _paged_fake(q: Tensor, k: Any, v: Any, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v_cache.shape[3])


def _rope_paged_fake(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Any, k_norm: Any, eps: float,
                     k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _paged_fake(q, k, v, k_cache, v_cache)


def listed(items: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, items))) or "none"

"""Storing keys, values and latent vectors in one launch: the same bits as the definitions in PyTorch; and what a layer of a
vendor's backend launches beside its kernel. In Triton's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire import AttentionSite, CommonAttentionMetadata
from quire.attn_ops import kv_store
from quire.attn_ops.backends import aiter, cudnn, flash_attention, flashinfer_mla, flashmla, trtllm_mha, trtllm_mla
from quire.attn_ops.conformance.batches import lay_out, planned, prepared
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_quant import is_fixed, write_kv
from quire.attn_ops.kv_store import store_kv, store_latent
from quire.attn_ops.mla import write_latent
from quire.attn_ops.step import Step, StepLimits, running
from tests.attn_ops.cases import bits

pytest.importorskip("triton")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
#: Token 1 is not written; the others go to the end of a page, the start of the next one, and a page further on.
SLOTS = [7, -1, 8, 23, 21]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on any device."""
    monkeypatch.setattr(kv_store, "has_kernel", lambda device_type: True)


def caches(dtype: torch.dtype, layout: str, heads: int, dim: int, dim_v: int, latent: bool = False, **options: Any
           ) -> PagedKVCache:
    cache = PagedKVCache(num_layers=1, page_size=8, num_kv_heads=heads, head_dim=dim, head_dim_v=dim_v, dtype=dtype,
                         device=DEVICE, layout=layout, latent=latent, **{"num_pages": 4, **options})
    for t in cache.of_layer(0):
        if t is not None and not is_fixed(t):
            (t.view(torch.int8) if t.dtype.itemsize == 1 else t).copy_(torch.randint(-9, 9, t.shape))
    return cache


def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers whose rows are strided, as a fused projection leaves them."""
    return torch.randn(*shape[:-1], shape[-1] + 3, device=DEVICE).to(dtype)[..., : shape[-1]]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype, kv_dtype", [
    (torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.int8)], ids=str)
@pytest.mark.parametrize("heads, dim, dim_v", [(3, 16, 16), (1, 40, 24)])
def test_stores_what_the_definition_stores(kernel, layout, dtype, kv_dtype, heads, dim, dim_v) -> None:
    """Bit for bit, and nothing beside the mapped slots: else pages differ by the backend that wrote them."""
    k, v, slots = new(5, heads, dim, dtype=dtype), new(5, heads, dim_v, dtype=dtype), torch.tensor(SLOTS, device=DEVICE)
    mine = caches(kv_dtype, layout, heads, dim, dim_v)
    theirs = tuple(None if t is None else t.clone() for t in mine.of_layer(0))
    store_kv(k, v, *mine.of_layer(0), slots)
    write_kv(k, v, *theirs, slots)
    for one, other in zip(mine.of_layer(0), theirs, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(bits(one), bits(other)))
    store_kv(None, None, *mine.of_layer(0), slots)
    assert torch.equal(bits(mine.k[0]), bits(theirs[0])), "a layer that shares a cache writes nothing"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_stores_by_a_fixed_scale_what_the_definition_stores(kernel, layout, dtype, kv_dtype) -> None:
    """Every number of float16, in random order, and some of float32: codes, ties, what is too small, what does not fit, NaN and
    infinities. A code that differs would be another key on another backend; the scales stay."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(dtype)
    every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    if dtype == torch.float32:
        every = every * (1 + 2**-12 * torch.randn(len(every), generator=torch.Generator().manual_seed(1)))
    k, v = (x.view(64, 8, 64).to(DEVICE) for x in every.view(2, -1))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2)).to(DEVICE) + 8
    slots[5] = -1
    mine = caches(kv_dtype, layout, 8, 64, 64, num_pages=10, kv_scales={0: (0.37, 0.002)})
    theirs = tuple(t.clone() for t in mine.of_layer(0))
    store_kv(k, v, *mine.of_layer(0), slots)
    write_kv(k, v, *theirs, slots)
    for one, other in zip(mine.of_layer(0), theirs, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert 0.01 < mine.v[0].float().isnan().float().mean() < 0.9, "some do not fit"


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8], ids=str)
def test_stores_latent_vectors(kernel, kv_dtype) -> None:
    c, k_rope, slots = new(5, 40, dtype=torch.float16), new(5, 8, dtype=torch.float16), torch.tensor(SLOTS, device=DEVICE)
    cache = caches(kv_dtype, "NHD", 1, 48, 40, latent=True)
    mine, _, *scales = cache.of_layer(0)
    theirs, their_scales = mine.clone(), [None if s is None else s.clone() for s in scales]
    store_latent(c, k_rope, mine, slots, *scales)
    write_latent(c, k_rope, theirs, slots, *their_scales)
    assert torch.equal(bits(mine), bits(theirs))
    assert all(s is None or torch.equal(s, t) for s, t in zip(scales, their_scales, strict=True))


def test_scales_that_do_not_match_are_refused(kernel) -> None:
    cache = caches(torch.float16, "NHD", 1, 8, 8)
    k = new(1, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="takes no k_scale"):
        store_kv(k, k, cache.k[0], cache.v[0], torch.ones(4, 8, 1), torch.ones(4, 8, 1), torch.tensor([3]))


class Launches(TorchDispatchMode):
    """The ATen operations that compute something, which on a GPU are launches."""

    FREE = {"detach", "view", "as_strided", "select", "slice", "transpose", "t", "unsqueeze", "squeeze", "empty", "new_empty",
            "empty_like", "empty_strided", "alias", "expand", "permute", "split", "_unsafe_view", "unbind", "_to_copy",
            "lift_fresh", "_reshape_alias", "contiguous", "reshape"}

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def nothing(*args: Any, **kwargs: Any) -> Any:
    return kwargs.get("out")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages whose kernels do nothing, and the kernel that stores, which counts as one launch."""
    def fresh(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty_like(q)

    def latent(q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:-1], 512)

    def stored(k: Any, v: Any, *rest: Any) -> None:
        torch.zeros(1)

    wrapper = SimpleNamespace(plan=nothing, run=nothing)
    modules = {
        "flashinfer": {}, "flashinfer.decode": {"xqa_batch_decode_with_kv_cache": nothing},
        "flashinfer.cudnn": {"cudnn_batch_decode_with_kv_cache": nothing},
        "aiter": {"paged_attention_ragged": nothing, "mha_batch_prefill_func": fresh},
        "flash_attn_interface": {"flash_attn_with_kvcache": fresh},
        "flash_mla": {"flash_mla_with_kvcache": lambda q, *a, **k: (latent(q),), "get_mla_metadata": lambda: (None,)},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": lambda *a, **k: wrapper,
                           "trtllm_batch_decode_with_kv_cache_mla": lambda query, **k: latent(query)}}
    for name, functions in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    monkeypatch.setattr(flash_attention, "_installed", lambda: ("FA3", "flash_attn_interface", 1))
    monkeypatch.setattr(kv_store, "has_kernel", lambda device_type: True)
    monkeypatch.setattr(kv_store.host, "kernel_module", lambda name: SimpleNamespace(write=stored))


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (5, 1, 2)], ids=["decode", "mixed"])
@pytest.mark.parametrize("module", [trtllm_mha, cudnn, flash_attention, aiter], ids=lambda m: m.NAME)
def test_a_layer_launches_little_beside_the_vendors_kernel(packages, module, query_lens) -> None:
    """Storing and the zeros of padding: what depends on the step alone is computed once for all layers."""
    site = AttentionSite(0, 4, 2, 64, 64, torch.float16, 0.125)
    backend = dataclasses.replace(module.BACKEND, op=module.paged_attention, make_state=None)
    batch = lay_out(site, query_lens, (20, 9, 33), page_size=16, pad=(2, 1), expect=False)
    with planned(backend, batch), running(Step(batch.cache, batch.metadata, states={module.NAME: torch.zeros(1)})):
        given = prepared(backend, batch)
        with Launches() as seen:
            backend.op(*batch.arguments(given), **batch.options)
    assert seen.names == ["zeros", "masked_fill_"]


@pytest.mark.parametrize("module", [flashinfer_mla, flashmla, trtllm_mla], ids=lambda m: m.NAME)
def test_a_layer_of_mla_launches_little_beside_the_vendors_kernel(packages, module) -> None:
    """Storing, the products with kv_b, the query in one piece where the kernel takes it so, and the zeros of padding."""
    page, heads, dtype = 64, 2, torch.bfloat16
    cache = PagedKVCache(num_layers=1, num_pages=4, page_size=page, num_kv_heads=1, head_dim=576, head_dim_v=512, dtype=dtype,
                         device="cpu", latent=True)
    meta = CommonAttentionMetadata.build([1, 1], [3, 70], [[1, 0], [2, 3]], page_size=page, device="cpu").padded(3, 3)
    limits = StepLimits(3, 3, 2)
    site = AttentionSite(0, heads, heads, 192, 128, dtype, 0.1)
    state = flashinfer_mla.State([site], cache, limits) if module is flashinfer_mla else torch.zeros(1)
    step = Step(cache, meta, states={module.NAME: state}, graph_key="graph", capturing=True)
    if module is flashinfer_mla:
        state.kinds = {(heads, 0.1, dtype)}
        state.plan(meta, step)
    tables = (meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens)
    given = module.BACKEND.prepare(*tables, page)
    q, c, k_rope, kv_b = (torch.randn(*s, dtype=dtype) for s in ((3, heads, 192), (3, 512), (3, 64), (heads * 256, 512)))
    with running(step), Launches() as seen:
        module.mla_paged_attention(q, c, k_rope, kv_b, cache.k[0], *tables, given, scale=0.1)
    whole = [] if module is flashinfer_mla else ["cat"]
    assert seen.names == ["zeros", "bmm", *whole, "masked_fill_", "bmm"]

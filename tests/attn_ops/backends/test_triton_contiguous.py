"""Long prompts of the Triton backend by contiguous keys: the copy, the kernel, and the rule by which a step comes there. Runs
on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backends.triton import BACKEND, extend_route
from quire.attn_ops.backends.triton.extend_route import RouteConfig, seconds, serves_expanded
from quire.attn_ops.backends.triton.plan import overridden
from quire.attn_ops.conformance.batches import check
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit, lay_out_mla
from quire.attn_ops.kernels.host import Caches, kernel_module, next_power_of_2
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.kv_quant import dequantize
from quire.attn_ops.ops.varlen import varlen_attention_eager
from quire.attn_ops.step import Step, running
from tests.attn_ops.cases import bits, check_case, check_output, make_case, run_case

triton = pytest.importorskip("triton")  # tests/conftest.py has set TRITON_INTERPRET by now, where there is no GPU

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(triton.language.sum, triton.runtime.JITFunction):
    pytest.skip("triton was imported before TRITON_INTERPRET=1 could be set: set it outside, or run this file alone",
                allow_module_level=True)
contiguous = kernel_module("backends.triton.extend_contiguous")
ContiguousConfig = contiguous.ContiguousConfig
FP16, INT8, FP8 = torch.float16, torch.int8, torch.float8_e4m3fn
SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=64, page_size=4, dtype=FP16, device=DEVICE)
MIXED = [1, 21, 0, 3], [9, 40, 7, 3]  # a decode, the end of a prompt, no token, a short prompt


@pytest.fixture
def always():
    """Every step that may goes by contiguous keys, in tiles small enough for several of each kind."""
    with overridden(RouteConfig, mode="always"), overridden(ContiguousConfig, block_m=16, block_n=16):
        yield


@pytest.fixture
def no_pages(monkeypatch):
    """The kernel that follows pages is not there."""
    def missing(*args, **kwargs):
        raise AssertionError("the step went by pages")

    monkeypatch.setattr(kernel_module("backends.triton.extend"), "extend", missing)


@pytest.mark.parametrize(("page_size", "dims", "options"), [
    (1, (64, 64), {}), (4, (96, 64), {}), (12, (64, 64), dict(layout="HND")), (16, (80, 80), {}),
    (4, (64, 64), dict(kv_dtype=INT8)), (16, (96, 96), dict(kv_dtype=FP8, layout="HND"))], ids=str)
def test_copy(page_size, dims, options) -> None:
    """Sequence after sequence as its pages read back, without those that are not wanted; page numbers are in random order."""
    module, query_lens, seq_lens = kernel_module("kernels.gather_kv"), [2, 1, 5, 0, 3], [11, 6, 35, 9, 3]
    case = make_case(query_lens, seq_lens, **{**SMALL, "page_size": page_size, "head_dim": dims[0], "head_dim_v": dims[1]},
                     **options, poison=float("nan"), pad_reqs=2)
    run_case(BACKEND, case)  # stores the new keys
    meta, caches = case.metadata, Caches(*case.cache.of_layer(0))
    starts = module.kv_starts(meta.query_start_loc, meta.seq_lens, 2)
    assert starts.tolist() == [0, 11, 11, 46, 46, 49, 49, 49]
    for padded in (True, False):
        both = module.gather_kv(caches, meta.block_table_tensor, starts, 49, FP16, padded)
        for found, dim, cache, scale in zip(both, dims, caches[:2], caches[2:], strict=True):
            read = cache if scale is None else dequantize(cache, scale)
            expected = torch.cat([torch.stack([read[int(meta.block_table_tensor[row, p // page_size]), p % page_size]
                                               for p in range(seq_lens[row])]) for row in (0, 2, 4)])
            assert found.shape == (49, 2, next_power_of_2(dim, 16) if padded else dim) and found.dtype == FP16
            assert torch.equal(found[..., :dim], expected.to(FP16))
            assert not found[..., dim:].any()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dim_v", "features"), [
    (2, 2, 64, 64, dict(pad_tokens=5, pad_reqs=2)), (8, 1, 64, 64, dict(poison=float("nan"))),
    (4, 2, 64, 64, dict(softcap=5.0, sinks=True)), (2, 1, 64, 64, dict(kv_dtype=INT8, layout="HND")),
    (2, 2, 64, 64, dict(write=False, strided=True)), (2, 2, 64, 64, dict(scale=-0.1)),
    *(pytest.param(*variant, marks=pytest.mark.slow) for variant in (
        (4, 1, 96, 128, dict(sinks=True)), (2, 1, 256, 256, dict(softcap=5.0)), (2, 1, 128, 128, dict(kv_dtype=FP8)))),
], ids=str)
def test_attention(always, no_pages, heads, kv_heads, dim, dim_v, features) -> None:
    shape = {**SMALL, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "head_dim_v": dim_v}
    check_case(BACKEND, make_case(*MIXED, **shape, **features))


def test_one_prompt(always, no_pages) -> None:
    """Tiles whose ends are those of the sequence, and not; a chunk after cached tokens."""
    for query_lens, seq_lens in (([32], [48]), ([17], [17]), ([2], [50])):
        check_case(BACKEND, make_case(query_lens, seq_lens, **SMALL))


def test_tiles_as_on_a_gpu(no_pages) -> None:
    with overridden(RouteConfig, mode="always"):
        check_case(BACKEND, make_case([70, 1, 65], [135, 3, 65], **{**SMALL, "num_heads": 1, "num_kv_heads": 1}))


@pytest.mark.filterwarnings("ignore:invalid value")  # in the interpreter
def test_what_is_not_finite_stays_in_its_sequence(always, no_pages) -> None:
    case = make_case([5, 6], [20, 21], **SMALL)
    wanted = run_case(BACKEND, case)
    case.k[5:], case.v[5:] = float("nan"), float("inf")
    found = run_case(BACKEND, case)
    assert torch.equal(bits(found[:5]), bits(wanted[:5])) and not torch.isfinite(found[5:]).any()


def test_state(always, no_pages) -> None:
    """Output and log-sum-exp, of sequences with one query token too."""
    case = make_case(*MIXED, **SMALL, pad_tokens=2)
    with running(Step(case.cache, case.metadata)):
        out, lse = BACKEND.state_op(*case.arguments([])[:11], [], scale=case.site.scale, softcap=None, causal=True)
    check_output(out, case)
    starts = torch.tensor([0, *np.cumsum([len(k) for k in case.keys])], dtype=torch.int32)
    _, expected = varlen_attention_eager(case.q.float().cpu(), torch.cat(case.keys).float().cpu(),
                                         torch.cat(case.values).float().cpu(), case.metadata.query_start_loc_cpu, starts,
                                         scale=case.site.scale, causal=True)
    live = case.metadata.num_actual_tokens
    torch.testing.assert_close(lse[:live].cpu(), expected[:live], rtol=1e-3, atol=1e-3)
    assert torch.isinf(lse[live:]).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, nope, rope, dim_v", [(2, 64, 16, 64), (1, 128, 64, 128), (2, 64, 32, 128)])
def test_expanded_keys_of_mla(always, heads, nope, rope, dim_v, causal) -> None:
    """Keys and values side by side, and a rotary part that all heads share; sequences without keys or queries, padding, and
    values that are not finite behind a sequence."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = [21, 1, 0, 17, 5], ([21, 1, 0, 17, 5] if causal else [40, 16, 9, 0, 33])
    tokens, rows = sum(queries) + 3, sum(keys) + 2
    q, kv, k_rope = (torch.randn(*size, generator=generator).half().to(DEVICE) for size in (
        (tokens, heads, nope + rope), (rows, heads * (nope + dim_v)), (rows, 2 * rope)))
    k_rope = k_rope[:, rope:]  # columns of the latent vectors
    kv[sum(keys):] = float("nan")
    starts_q, starts_k = (torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32, device=DEVICE) for lens in (queries, keys))
    out, lse = contiguous.attend_to_expanded(q, kv, k_rope, starts_q, starts_k, scale=0.11, causal=causal)
    split = kv.float().cpu().unflatten(1, (heads, -1))
    whole = torch.cat([split[..., :nope], k_rope.float().cpu()[:, None].expand(-1, heads, -1)], dim=-1)
    expected, expected_lse = varlen_attention_eager(q.float().cpu(), whole, split[..., nope:], starts_q.cpu(), starts_k.cpu(),
                                                    scale=0.11, causal=causal)
    # fp16: weights and outputs are rounded, to 2**-11
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-3, atol=1e-3)


def test_long_prompts_of_mla_go_by_expanded_keys(always, monkeypatch) -> None:
    """A step of the op: a decode, prompts with and without cached tokens."""
    seen, attend = [], contiguous.attend_to_expanded
    monkeypatch.setattr(contiguous, "attend_to_expanded", lambda *args, **kw: seen.append(kw["causal"]) or attend(*args, **kw))
    site = AttentionSite(layer=0, num_heads=2, num_kv_heads=2, head_dim=80, head_dim_v=64, dtype=FP16, scale=0.1,
                         latent=Latent(512, 16))
    check(MlaKit(Kit(BACKEND, DEVICE, FP16)).backend, lay_out_mla(
        site, (1, 300, 90), (20, 800, 90), page_size=16, device=DEVICE))
    assert seen == [True, False]


def test_which_heads_of_mla_go_by_expanded_keys(always) -> None:
    """Others keep the way that takes any dims."""
    takes = {dims: serves_expanded(*dims, FP16, DEVICE) for dims in (
        (128, 64, 128), (64, 32, 64), (192, 64, 256), (128, 24, 128), (64, 64, 96))}
    assert list(takes.values()) == [True, True, False, False, False]
    assert not serves_expanded(128, 64, 128, torch.float32, DEVICE)


@pytest.mark.parametrize("stays", [dict(window=9), dict(chunk=16), dict(dtype=torch.float32), dict(head_dim=32)], ids=str)
def test_layers_that_stay_with_pages(always, stays, monkeypatch) -> None:
    monkeypatch.setattr(kernel_module("backends.triton.extend_contiguous"), "extend_contiguous", None)
    check_case(BACKEND, make_case([6, 1], [20, 9], **{**SMALL, **stays}))


def went(case, **options) -> bool:
    """Whether the case goes by contiguous keys."""
    module, found = kernel_module("backends.triton.extend_contiguous"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "extend_contiguous", lambda *args: found.append(args))
        run_case(BACKEND, case, **options)
    return bool(found)


def test_steps_that_stay_with_pages(always) -> None:
    case = make_case([1, 3, 2], [9, 7, 2], **SMALL)
    assert went(case)
    assert not went(case, graph_key="graph")  # it is replayed for other lengths
    assert not went(make_case([1], [9], **SMALL))
    with overridden(RouteConfig, max_bytes=9 * 2 * 2 * 2 * 64):  # 7 + 2 tokens
        assert went(case)
    with overridden(RouteConfig, max_bytes=9 * 2 * 2 * 2 * 64 - 1):
        assert not went(case)
    with overridden(RouteConfig, mode="never"):
        assert not went(case)
    other = make_case([2, 2, 2], [9, 7, 2], **SMALL)  # of the same shape
    with running(Step(case.cache, other.metadata)):
        check_output(BACKEND.op(*case.arguments([]), **case.options), case)


def test_without_memory_for_the_copy(always, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel_module("backends.triton.extend_contiguous"), "gather_kv", full)
    check_case(BACKEND, make_case(*MIXED, **SMALL))


def test_alike_layers_of_a_step_share_one_plan(always, monkeypatch) -> None:
    case, plans = make_case(*MIXED, **SMALL), []
    starts = kernel_module("kernels.gather_kv").kv_starts
    monkeypatch.setattr(kernel_module("kernels.gather_kv"), "kv_starts", lambda *args: plans.append(args) or starts(*args))
    step = Step(case.cache, case.metadata)
    with running(step):
        for _ in range(2):
            check_output(BACKEND.op(*case.arguments([]), **case.options), case)
    assert len(plans) == 1
    other = make_case([2, 2], [5, 2], **SMALL)
    with running(replace(step, cache=other.cache, metadata=other.metadata)):
        check_output(BACKEND.op(*other.arguments([]), **other.options), other)


def test_kernels_of_both_ways_are_compiled_ahead(always) -> None:
    with recording() as found:
        run_case(BACKEND, make_case(*MIXED, **SMALL))
    assert {"extend_kernel", "gather_kernel", "contiguous_kernel"} <= {each.name for each in found}


H200 = dict(num_sms=132)


def gain(query: int, context: int, rows: int = 1, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> float:
    """Estimated time by pages over that by contiguous keys."""
    paged, contiguous = seconds(np.full(rows, query), np.full(rows, query + context), heads, kv_heads, (dim, dim), 2, **H200)
    return paged / contiguous


def test_the_rule_counts_how_often_a_key_is_read() -> None:
    assert gain(8192, 8192) > gain(1024, 8192) > gain(128, 8192)
    assert gain(8192, 0) > 1.05 and gain(8192, 24576) > 1.1 and gain(8, 32768) < 1
    assert gain(8192, 8192, kv_heads=1) > gain(8192, 8192) > gain(8192, 8192, kv_heads=32)  # bytes to copy
    assert gain(64, 0, rows=64) < 1  # launches


def test_an_engine_counts_time_and_memory(monkeypatch) -> None:
    """Of layers without a window, on GPUs where it was measured; else nothing."""
    monkeypatch.setattr(extend_route.host, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(extend_route.host, "num_sms", lambda device: 132)
    cuda, lens = torch.device("cuda", 0), (np.array([8192, 1]), np.array([16384, 900]))
    site = AttentionSite(layer=0, num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, dtype=torch.bfloat16, scale=1.0)
    window = replace(site, window=1024)
    with_graph, without = BACKEND.without_graph([site, window], cuda, None, *lens)
    assert 2000 < without < with_graph < 6000  # microseconds
    assert BACKEND.without_graph([site] * 3, cuda, None, *lens)[0] == pytest.approx(3 * with_graph)
    assert BACKEND.without_graph([window], cuda, None, *lens) == (0, 0)
    assert BACKEND.without_graph([site], torch.device("cpu"), None, *lens) == (0, 0)
    per_token = 2 * 8 * (128 + 128)
    assert BACKEND.scratch_bytes([site, window], cuda, 1000) == 1000 * per_token
    assert BACKEND.scratch_bytes([site], cuda, 10**9) == 512 * 2**20
    assert BACKEND.scratch_bytes([window], cuda, 1000) == BACKEND.scratch_bytes([site], torch.device("cpu"), 1000) == 0
    long = np.array([8192]), np.array([512 * 2**20 // per_token + 1])  # no room for the copy
    assert len(set(BACKEND.without_graph([site], cuda, None, *long))) == 1

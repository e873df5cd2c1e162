"""The Triton backend on a GPU: sizes that the interpreter is too slow for, CUDA graphs, big caches, races."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quire import AttentionSite, Engine
from quire.attn_ops.backends.triton import BACKEND
from quire.attn_ops.backends.triton.decode import DecodeConfig
from quire.attn_ops.backends.triton.extend import ExtendConfig
from quire.attn_ops.backends.triton.extend_route import RouteConfig
from quire.attn_ops.backends.triton.plan import overridden
from quire.attn_ops.kernels.host import Caches, kernel_module
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.graph_runner.bench.attention_op import decode_point, measure, op_batch, work
from quire.graph_runner.bench.roofline import copy_bandwidth
from tests.attn_ops.cases import check_case, check_output, make_case, run_case
from tests.attn_ops.oracle import quantized
from tests.gpu.helpers import captured, check_likely
from tests.tiny import GREEDY, small_llama, tokens

LLAMA = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, device="cuda")
BATCHES = [
    ([1] * 16, [1, 15, 16, 17, 32, 63, 64, 65, 127, 500, 1023, 1024, 1025, 2049, 4000, 6007]), ([1], [9001]),
    ([1] * 150, [1 + 7 * i for i in range(150)]), ([1500], [1500]),
    ([64], [5000]),  # keys divided among programs
    ([1, 300, 1, 0, 64, 1, 2, 129], [4000, 900, 1, 0, 64, 33, 2000, 1129]),
]
LAYOUT = pytest.mark.parametrize("layout", ["NHD", "HND"])
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KV_DTYPES = sorted(QUANTIZED_KV_DTYPES, key=str)
#: Dtypes of the model and of a quantized cache: codes and scales bit for bit, numbers within the bound of what reads back.
KINDS = pytest.mark.parametrize(("dtype", "kv_dtype"), [*((d, None) for d in DTYPES), *((DTYPES[0], kv) for kv in KV_DTYPES)],
                                ids=str)


def check(query_lens, seq_lens, **options):
    kv_dtype = options.get("kv_dtype")
    if torch.cuda.get_device_capability() < BACKEND.capabilities.min_kv_compute_capability.get(kv_dtype, (0, 0)):
        pytest.skip(f"{kv_dtype} needs a newer GPU")
    check_case(BACKEND, make_case(query_lens, seq_lens, **{**LLAMA, **options}))


@LAYOUT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES], ids=str)
def test_batches(kv_dtype, dtype, layout):
    for batch in BATCHES:  # as many padded rows as tokens where all decode: else the step is no decode any more
        check(*batch, dtype=dtype, layout=layout, kv_dtype=kv_dtype, pad_tokens=6, pad_reqs=6 if max(batch[0]) == 1 else 3)


@KINDS
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dim_v"), [
    (32, 32, 128, 128), (8, 1, 256, 256), (64, 8, 64, 64), (32, 4, 80, 80), (12, 12, 64, 64), (8, 4, 256, 256),
    (16, 16, 192, 128), (71, 1, 64, 64), (20, 4, 96, 96), (64, 1, 256, 256), (4, 4, 16, 16), (20, 1, 64, 64), (32, 1, 128, 128),
    (24, 1, 256, 256), (48, 1, 128, 128), (64, 1, 64, 64),
])
def test_heads_and_dims(heads, kv_heads, dim, dim_v, dtype, kv_dtype):
    shape = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, dtype=dtype, kv_dtype=kv_dtype)
    check([1] * 5, [1, 64, 700, 1025, 3000], **shape)
    check([1, 200, 33, 1], [900, 200, 1000, 5], **shape)


@KINDS
@pytest.mark.parametrize("features", [
    dict(window=128), dict(window=1000, softcap=30.0), dict(sinks=True, window=128), dict(chunk=512),
    dict(window=700, softcap=20.0, sinks=True, chunk=1024), dict(write=False), dict(strided=True), dict(page_size=1),
    dict(poison=float("nan")),
], ids=str)
def test_features(features, dtype, kv_dtype):
    options = dict(features, dtype=dtype, kv_dtype=kv_dtype)
    check([1] * 6, [1, 127, 128, 129, 1500, 4000], **options)
    check([1, 400, 1, 130], [3000, 1700, 129, 130], **options, pad_tokens=4, pad_reqs=2)
    check([48], [3000], **options)


def test_cache_of_more_than_2_31_elements():
    shape = {**LLAMA, "num_pages": 150_000, "poison": 0.0, "dtype": torch.bfloat16}  # 4.9 GB of keys, as much of values
    for query_lens, seq_lens in (([1, 1, 1], [3000, 5000, 4000]), ([1, 500, 64], [3000, 5000, 4000])):
        case = make_case(query_lens, seq_lens, **shape)
        k_cache = case.cache.k[0]
        assert int(case.metadata.block_table_tensor.max()) * k_cache.stride(0) > 2**31
        check_case(BACKEND, case)


# Speed: a step that has keys enough to read is bound by reading them, whatever the heads.


@pytest.mark.alone
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_decode_is_bound_by_memory(group, dim):
    """Models with one or two query heads a key head (Llama-2, Phi-3, GPT-2, Qwen3-0.6B, Gemma-2) decode as fast as others.

    256 MB of keys and values, so that launch and tail do not count. Half the rate of a copy leaves room for a machine that
    is shared; sums of products on groups of one and two, which this test is about, reached 13 to 47 % of it
    (benchmarks/results/h200_decode_grid.json).
    """
    device, kv_heads, batch = torch.device("cuda"), 8, 32
    context = (256 << 20) // (batch * kv_heads * dim * 2 * 2)
    site = AttentionSite(0, kv_heads * group, kv_heads, dim, dim, torch.bfloat16, dim**-0.5)
    point = decode_point(batch, context)
    batch = op_batch(site, point, page_size=16, device=device)
    us = min(measure(BACKEND, batch).us for _ in range(2))
    assert work(site, point)[0] / us * 1e6 > 0.5 * copy_bandwidth(device), f"{us:.0f} us"


# Long prompts by contiguous keys.

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def by_copies(monkeypatch):
    """Every step that may goes by contiguous keys, and the kernel that follows pages is not there."""
    monkeypatch.delattr(kernel_module("backends.triton.extend"), "extend")
    with overridden(RouteConfig, mode="always"):
        yield


@LAYOUT
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES], ids=str)
def test_contiguous_keys(kv_dtype, dtype, layout, by_copies):
    for batch in (*BATCHES[3:], ([1025], [3000]), ([2], [3])):
        padding = dict(pad_tokens=14, pad_reqs=3) if len(batch[0]) > 1 else {}  # one row alone has a path of its own
        check(*batch, dtype=dtype, layout=layout, kv_dtype=kv_dtype, poison=float("nan"), **padding)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dim_v"), [
    (8, 8, 128, 128), (8, 1, 256, 256), (64, 8, 64, 64), (32, 4, 80, 80), (8, 4, 256, 256), (16, 16, 192, 128), (71, 1, 64, 64),
    (20, 4, 96, 96),
])
def test_contiguous_heads_and_dims(heads, kv_heads, dim, dim_v, dtype, by_copies):
    check([1, 200, 333, 1], [900, 200, 1000, 5], num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
          dtype=dtype)


@pytest.mark.parametrize("features", [
    dict(softcap=30.0), dict(sinks=True), dict(softcap=20.0, sinks=True), dict(write=False), dict(strided=True),
    dict(page_size=1), dict(page_size=256), dict(scale=-0.05),
], ids=str)
def test_contiguous_features(features, by_copies):
    check([1, 400, 1, 130], [3000, 1700, 129, 130], **features, dtype=torch.bfloat16, pad_tokens=4, pad_reqs=2)


def test_the_copy_is_exact_beyond_2_31_elements():
    case = make_case([300, 64], [5000, 4000], **{**LLAMA, "num_pages": 150_000, "poison": 0.0, "dtype": torch.bfloat16})
    run_case(BACKEND, case)
    meta, caches, module = case.metadata, Caches(*case.cache.of_layer(0)), kernel_module("kernels.gather_kv")
    starts = module.kv_starts(meta.query_start_loc, meta.seq_lens)
    keys, values = module.gather_kv(caches, meta.block_table_tensor, starts, 9000, torch.bfloat16)
    assert torch.equal(keys, torch.cat(case.keys)) and torch.equal(values, torch.cat(case.values))


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call by contiguous keys."""
    module, found = kernel_module("backends.triton.extend_contiguous"), []
    launch = module.extend_contiguous
    monkeypatch.setattr(module, "extend_contiguous", lambda *args: found.append(args) or launch(*args))
    return found


def test_long_prompts_go_by_contiguous_keys_where_it_was_measured(calls):
    """By default, with about the same result as by pages; not in a graph."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("measured on compute capability 9.0 only")
    case = make_case([4096, 1], [12288, 700], **LLAMA, dtype=torch.bfloat16, expect=False)
    found = run_case(BACKEND, case)
    assert len(calls) == 1
    with overridden(RouteConfig, mode="never"):
        torch.testing.assert_close(found, run_case(BACKEND, case), rtol=2**-6, atol=2**-8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_case(BACKEND, case)
    run_case(BACKEND, make_case([20, 1], [4096, 700], **LLAMA, dtype=torch.bfloat16, expect=False))  # each key read by few
    assert len(calls) == 1


def test_an_engine_by_contiguous_keys(calls):
    """Chunks of prompts beside decodes, each chunk after those before it."""
    model = small_llama(std=0.1, head_dim=64, hidden_size=128, max_position_embeddings=4096).to("cuda", torch.bfloat16)
    prompts = [[3 + i % 50 for i in range(n)] for n in (1500, 40, 700)]
    with overridden(RouteConfig, mode="always"), Engine(
            model, attention="triton", compiler="eager", num_pages=300, max_num_seqs=3, max_num_batched_tokens=512,
            cudagraph_capture_sizes=[3], cudagraph_token_sizes=[]) as engine:
        for prompt, found in zip(prompts, tokens(engine.generate(prompts, GREEDY)), strict=True):
            check_likely(model, prompt, found)
    assert len(calls) >= 4  # of one layer


# CUDA graphs: one capture, any lengths later.

BUCKETS = {
    # name: lengths at capture, then at each replay: (query_lens, seq_lens); padded to the tokens and rows given
    "decode": (8, 8, ([1] * 8, [1] * 8), ([1] * 8, [8192, 1, 17, 500, 4096, 16, 3000, 1025]), ([1] * 3, [20, 8000, 1]),
               ([1] * 8, [8192, 1, 17, 500, 4096, 16, 3000, 1025])),
    "scheduled": (40, 40, ([1] * 40, [1] * 40), ([1] * 40, [8192, 2049, 1, *[700] * 37]), ([1] * 35, [2500, *[900] * 34]),
                  ([1] * 40, [1] * 40), ([1] * 40, [8192, 2049, 1, *[700] * 37])),
    "single": (1, 1, ([1], [1]), ([1], [8192]), ([1], [5])),
    "mixed": (96, 8, ([1] * 8, [1] * 8), ([1, 60, 1, 30], [8192, 4000, 3, 30]), ([96], [7000]), ([1] * 8, [900] * 8),
              ([1, 60, 1, 30], [8192, 4000, 3, 30])),
    "prefill": (1024, 2, ([1], [1]), ([1000], [1000]), ([500, 500], [8000, 600]), ([1, 3], [8000, 3])),
}


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("features", [{}, dict(window=300, sinks=True), dict(kv_dtype=torch.int8)], ids=str)
def test_graph_captured_short_and_replayed_long(bucket, features):
    tokens, reqs, *batches = BUCKETS[bucket]

    def batch(query_lens, seq_lens, seed):
        return make_case(query_lens, seq_lens, **LLAMA, dtype=torch.bfloat16, **features, seed=seed, num_pages=3000,
                         table_width=512, pad_tokens=tokens - sum(query_lens), pad_reqs=reqs - len(query_lens),
                         poison=float("nan"))

    static = batch(*batches[0], seed=0)
    graph, out = captured(lambda: run_case(BACKEND, static))
    previous = None
    for seed, (query_lens, seq_lens) in enumerate(batches[1:], 1):
        case = batch(query_lens, seq_lens, seed)
        for buffer, new in zip(static.buffers(), case.buffers(), strict=True):
            buffer.copy_(new)
        graph.replay()
        check_output(out, case)
        assert previous is None or not torch.equal(out, previous), "the replay changed nothing"
        previous = out.clone()
        slots = case.metadata.slot_mapping
        live = slots >= 0
        got, scale = (t if t is None else t[slots[live] // 16, slots[live] % 16] for t in static.cache.of_layer(0)[::2])
        if scale is None:
            assert torch.equal(got, case.new_k[live])
        else:
            codes, wanted = quantized(case.new_k[live], got.dtype)
            assert torch.equal(got, codes) and torch.equal(scale, wanted)


def test_merging_is_deterministic():
    """A race between programs that merge would change the result; the order of merging is fixed."""
    for query_lens, seq_lens in (([1] * 4, [8000, 7000, 6000, 65]), ([64], [6000])):
        case = make_case(query_lens, seq_lens, **LLAMA, dtype=torch.bfloat16)
        m = case.metadata
        with overridden(DecodeConfig, chunk_min=64), overridden(ExtendConfig, chunk_min=64):
            prepared = BACKEND.prepare(m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, m.page_size)
            first = BACKEND.op(*case.arguments(prepared), **case.options)
            check_output(first, case)
            differing = torch.zeros((), dtype=torch.int64, device="cuda")
            for _ in range(500):
                differing += (BACKEND.op(*case.arguments(prepared), **case.options) != first).any()
            assert int(differing) == 0
            assert not prepared[0].any()


def test_two_streams_at_once():
    cases = [make_case([1] * 4, [5000 + i, 3000, 64, 900], **LLAMA, dtype=torch.bfloat16, seed=i) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(30):
        for case, stream, results in zip(cases, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(run_case(BACKEND, case))
    torch.cuda.synchronize()
    for case, results in zip(cases, outs, strict=True):
        check_output(results[0], case)
        assert all(torch.equal(out, results[0]) for out in results)

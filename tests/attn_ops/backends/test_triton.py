"""The Triton backend against the oracle. Runs on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import re
from unittest.mock import MagicMock

import pytest
import torch

from quire.attn_ops.backends.triton import BACKEND, available
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.kernels.host import next_power_of_2
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.ops.rope import RopeForm, rope_kv_write_eager
from quire.attn_ops.step import Step, running
from tests.attn_ops.cases import bits, check_case, check_output, make_case, run_case, run_check

triton = pytest.importorskip("triton")  # tests/conftest.py has set TRITON_INTERPRET by now, where there is no GPU

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(triton.language.sum, triton.runtime.JITFunction):
    pytest.skip("triton was imported before TRITON_INTERPRET=1 could be set: set it outside, or run this file alone",
                allow_module_level=True)
from quire.attn_ops.backends.triton import common, decode, extend  # noqa: E402
from quire.attn_ops.backends.triton.plan import overridden  # noqa: E402
from quire.attn_ops.kernels import kv_write  # noqa: E402

DecodeConfig, ExtendConfig = decode.DecodeConfig, extend.ExtendConfig
SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=16, page_size=4, device=DEVICE)
FP32, FP16, INT8 = torch.float32, torch.float16, torch.int8
REAL = "real shapes"  # of which the quick kit's cases
CHECKS = [(name, FP32, None) for quick in (False, True) for name, _ in Kit(BACKEND, DEVICE, FP32, quick=quick).checks()
          if name.startswith(REAL) == quick]
CHECKS += [(name, FP16, None) for name in ("decode batch", "mixed batch", "features together", f"{REAL}: together")]
CHECKS += [(name, FP32, INT8) for name in ("shared cache (no k, v)", "strided q, k, v", "garbage in unused slots", "padding",
                                           "a batch in parts", "decode steps made ahead", f"{REAL}: together")]
CHECKS += [(f"KV cache {name}", FP16, None) for name in ("int8", "float8_e4m3fn")]
#: What others have: rotary: test_rope; heads and dims: test_heads_and_dims; shapes: test_split_extend; page size 4 and NHD: all
#: checks; features: "features together", and windows and chunks also "chunks at page boundaries"; a quantized cache: "KV cache
#: int8", and float8 test_quantized_splits; padding: "features together" and "stale metadata in padding"; real shapes: those of
#: all features together.
SLOW = re.compile(r"(head dims|query heads|page size (4|32|64|128|256)|layout NHD|rotary|states|padding|opcheck|windows at)\b|"
                  r"shape (.*(large|medium|encoder)|single_prefill)|feature |.* together torch.float16|"
                  r"KV cache (float8|int8 torch.float16)|real shapes: (?!together)|.* torch.int8$")


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), [
    pytest.param(*check, marks=[pytest.mark.slow] * bool(SLOW.match(" ".join(map(str, check))))) for check in CHECKS], ids=str)
def test_conformance(name, dtype, kv_dtype):
    run_check(Kit(BACKEND, DEVICE, dtype, kv_dtype, quick=name.startswith(REAL)), name)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dim_v", "dtype"), [
    (8, 2, 80, 80, FP32), (6, 2, 96, 96, FP16), (5, 1, 16, 24, FP32), (5, 1, 16, 24, FP16), (16, 1, 64, 64, FP16),
    pytest.param(71, 1, 16, 16, FP32, marks=pytest.mark.slow),
])
def test_heads_and_dims(heads, kv_heads, dim, dim_v, dtype):
    shape = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, page_size=16, dtype=dtype,
                 device=DEVICE)
    check_case(BACKEND, make_case([1, 1, 1], [33, 1, 90], **shape))
    check_case(BACKEND, make_case([1, 9, 20], [70, 9, 40], layout="HND", **shape))


@pytest.mark.parametrize("features", [
    dict(page_size=12), dict(window=11, softcap=3.0, sinks=True, chunk=32, scale=0.4),
    pytest.param(dict(scale=0.7), marks=pytest.mark.slow),
], ids=str)
def test_features(features):
    """Contexts of several windows and chunks; float16; T <= B without being a decode batch; pages of no power of two."""
    lens, shape = [1, 3, 4, 5, 12, 40, 75], {**SMALL, **features}
    check_case(BACKEND, make_case([1] * len(lens), lens, **shape))
    check_case(BACKEND, make_case([5, 1, 0, 70], [80, 77, 3, 90], **shape))
    check_case(BACKEND, make_case([5, 1, 1], [80, 77, 3], **{**shape, "dtype": FP16}))
    check_case(BACKEND, make_case([9, *[0] * 9], [80, *[0] * 9], **shape))


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 6], [9]])
def test_slot_minus_1_is_not_written(query_lens):
    """Also of a token that is not padding. What it attends to then is not defined."""
    case = make_case(query_lens, [n + 18 for n in query_lens], **SMALL)
    case.metadata.slot_mapping[0] = -1
    page, slots = SMALL["page_size"], case.metadata.slot_mapping[1:]
    before = [case.cache.k[0].clone(), case.cache.v[0].clone()]
    run_case(BACKEND, case)
    for old, cache, new in zip(before, (case.cache.k[0], case.cache.v[0]), (case.new_k, case.new_v), strict=True):
        old[slots // page, slots % page] = new[1:]
        assert torch.equal(cache, old)


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 6], [9]])
def test_inputs_whose_last_dim_is_not_contiguous(query_lens):
    case = make_case(query_lens, [n + 18 for n in query_lens], **SMALL, head_dim_v=32, strided=True)
    case.q = case.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    check_output(run_case(BACKEND, case), case)


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 6], [9]])
def test_sinks_that_do_not_lie_side_by_side(query_lens):
    """A column of a larger parameter, and one sink for all heads."""
    case = make_case(query_lens, [n + 18 for n in query_lens], **SMALL, sinks=True)
    case.sinks = torch.stack([case.sinks, torch.full_like(case.sinks, 50.0)], 1)[:, 0]
    check_output(run_case(BACKEND, case), case)
    case.sinks = case.sinks[:1].expand(len(case.sinks))
    spread = run_case(BACKEND, case)
    case.sinks = case.sinks.clone()
    assert torch.equal(spread, run_case(BACKEND, case))


@pytest.mark.parametrize("num_heads", [2, 4, 6, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_half_precision_goes_to_the_tensor_cores(num_heads, head_dim):
    """One query head per key head too: sums of products read keys at a fifth of the memory's rate (timed in tests/gpu)."""
    for slots in (1, 16, 100, 1000):
        dim = next_power_of_2(head_dim)
        assert decode.config(dim, dim, 2, num_heads // 2, slots, torch.device(DEVICE)).dot


@pytest.mark.parametrize("splits", [1, 4])
def test_a_state_with_a_broken_key_has_no_lse(splits):
    """Also where a query's keys are all broken: -inf would say that it has none, and NaN would be lost where states merge."""
    for keys in (slice(3, 4), slice(0, 40)):
        case = make_case([1, 5], [30, 40], **SMALL)
        page = case.metadata.block_table_tensor[1].repeat_interleave(4)[keys].long()
        case.cache.k[0][page, torch.arange(40)[keys] % 4, 1] = case.new_k[1:, 1] = float("nan")
        with overridden(ExtendConfig, max_splits=splits, chunk_min=8, block_n=16):
            out, lse = BACKEND.state_op(case.q, case.k, case.v, *case.cache.of_layer(0), *case.tables, [], scale=0.25,
                                        softcap=None, causal=True)
        for found in (out.isfinite().all(-1), lse.isfinite()):
            assert not found[1:, 2:].any() and found[:1].all() and found[:, :2].all()
        assert lse[1:, 2:].isnan().all()


# Keys split among programs.


@pytest.mark.parametrize(("dot", "features"), [
    (False, dict(sinks=True, softcap=4.0)), (True, dict(window=70, sinks=True)),
    *(pytest.param(*variant, marks=pytest.mark.slow) for variant in ((True, {}), (False, {}), (True, dict(write=False))))],
    ids=str)
def test_split_decode(dot, features):
    shape = dict(num_heads=6, num_kv_heads=2, head_dim=24, head_dim_v=16, page_size=4, device=DEVICE)
    with overridden(DecodeConfig, block_n=16, chunk_min=16, wave=7 * 2 * 5, dot=dot):
        shape |= features
        check_case(BACKEND, make_case([1] * 5, [1, 16, 17, 33, 150], **shape, pad_tokens=1, pad_reqs=1))
        check_case(BACKEND, make_case([1, 9, 1, 0], [150, 40, 2, 0], **shape, pad_tokens=2, pad_reqs=1))
    with overridden(DecodeConfig, block_n=16, chunk_min=16, wave=2 * 9, dot=dot):
        check_case(BACKEND, make_case([1] * 5, [1, 16, 17, 33, 150], **shape, pad_tokens=1, pad_reqs=1))


@pytest.mark.parametrize("features", [
    dict(window=40, sinks=True), dict(chunk=32),
    *(pytest.param(features, marks=pytest.mark.slow) for features in ({}, dict(sinks=True, softcap=4.0)))], ids=str)
def test_split_extend(features):
    with overridden(ExtendConfig, block_m=16, block_n=16, chunk_min=16, max_splits=5):
        check_case(BACKEND, make_case([9], [120], **SMALL, **features))
        check_case(BACKEND, make_case([9, 1, 0, 20], [120, 60, 7, 20], **SMALL, **features, pad_tokens=3, pad_reqs=1))


def test_one_forward_shares_its_counters():
    """Every launch leaves the counters at zero, so the next layer can use them."""
    case = make_case([9, 9], [150, 20], **SMALL)
    m = case.metadata
    prepared = BACKEND.prepare(m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, m.page_size)
    with overridden(ExtendConfig, block_m=16, block_n=16, chunk_min=16, max_splits=5):
        for _ in range(3):
            check_output(BACKEND.op(*case.arguments(prepared), **case.options), case)
            assert not prepared[0].any()


@pytest.mark.parametrize("query_lens", [[[1, 1, 1], [1, 0, 1]], [[4, 1, 1], [2, 2, 2], [6, 0, 0]]], ids=str)
def test_grids_depend_on_shapes_only(query_lens, monkeypatch):
    launches = MagicMock()
    for module, name in ((decode, "decode_kernel"), (extend, "extend_kernel"), (kv_write, "write_kernel")):
        monkeypatch.setattr(module, name, launches)
    seen = []
    for lens in query_lens:
        for context in (1, 300):
            launches.reset_mock()
            case = make_case(lens, [n + context for n in lens], **SMALL, num_pages=400, table_width=100,
                             pad_tokens=6 - sum(lens), pad_reqs=4 if sum(query_lens[0]) == 3 else 0, expect=False)
            run_case(BACKEND, case, graph_key="graph")
            seen.append([call.args for call in launches.__getitem__.call_args_list])
    assert seen[0] and all(grids == seen[0] for grids in seen)


def test_offsets_beyond_32_bits():
    """The pages lie more than 2**31 elements into the cache. Memory that nothing touches is never committed."""
    for query_lens in ([1, 1], [1, 6], [9]):
        case = make_case(query_lens, [n + 30 for n in query_lens], **{**SMALL, "dtype": torch.float16})
        used, page, heads, dim = case.cache.k[0].shape
        ahead = 2**31 // (page * heads * dim)
        for caches in (case.cache.k, case.cache.v):
            huge = torch.empty(ahead + used, page, heads, dim, dtype=torch.float16, device=DEVICE)
            huge[ahead:] = caches[0]
            caches[0] = huge
        case.metadata.block_table_tensor.add_(ahead)
        case.metadata.slot_mapping.add_(ahead * page)
        check_output(run_case(BACKEND, case), case)
        slots = case.metadata.slot_mapping
        assert torch.equal(case.cache.k[0][slots // page, slots % page], case.new_k)
        assert torch.equal(case.cache.v[0][slots // page, slots % page], case.new_v)


def far_apart(x):
    """Heads far enough apart for 32 bits to be too few for where the last one begins."""
    tokens, heads, dim = x.shape
    apart = -(-(2**31 + 64) // (heads - 1))
    memory = torch.empty((heads - 1) * apart + tokens * dim, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (dim, apart, 1)).copy_(x)


@pytest.mark.parametrize("query_lens", [[1, 6], [9]])
def test_heads_beyond_32_bits(query_lens):
    """As of a prompt whose queries lie head by head. Memory that nothing touches is never committed."""
    case = make_case(query_lens, [n + 30 for n in query_lens], **{**SMALL, "dtype": torch.float16})
    case.q, case.new_k, case.new_v = far_apart(case.q), far_apart(case.new_k), far_apart(case.new_v)
    check_output(run_case(BACKEND, case), case)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("query_lens", [[1], [5]])
def test_pages_beyond_32_bits(query_lens, layout):
    """The last tokens of one page of more than 2**31 elements, as a cache of one page per sequence has."""
    case = make_case(query_lens, [20], **{**SMALL, "dtype": torch.float16, "page_size": 32}, window=12, layout=layout)
    (_, page, heads, dim), ahead = case.cache.k[0].shape, 2**31 // 64
    for caches in (case.cache.k, case.cache.v):
        shape = (1, heads, ahead + page, dim) if layout == "HND" else (1, ahead + page, heads, dim)
        huge = torch.empty(shape, dtype=torch.float16, device=DEVICE)
        huge = huge.transpose(1, 2) if layout == "HND" else huge
        huge[0, ahead:] = caches[0][case.metadata.block_table_tensor[0, 0]]
        caches[0] = huge
    m = case.metadata
    m.slot_mapping.copy_(m.slot_mapping % page + ahead)
    m.block_table_tensor.zero_()
    m.seq_lens.add_(ahead), m.seq_lens_cpu.add_(ahead)
    check_output(run_case(BACKEND, case), case)


# Rotary embedding in front.


ROPE = [
    {}, dict(norm=True), dict(rotary=8), dict(rotary=6, norm=True), dict(window=11, softcap=3.0, sinks=True, chunk=32),
    dict(kv_dtype=torch.int8, norm=True), dict(head_dim=24, head_dim_v=40, num_heads=6), dict(strided=True, page_size=1),
    dict(dtype=torch.float16, layout="HND"), dict(num_heads=16, num_kv_heads=1, head_dim=80),
    dict(form=RopeForm(interleaved=True), rotary=8), dict(form=RopeForm(half_tables=True), sinks=True, window=11),
    dict(form=RopeForm(True, True, True), norm=True, chunk=32), dict(form=RopeForm(norm_offset=1.0), norm=True),
]
LENS = [[1], [1, 1, 1], [1] * 6, [3, 0, 0, 0], [5, 1, 0, 30]]
#: Quick: every option in one launch, those in two that change the rotation or the cache, the other batches once, keys that are
#: not split.
IN_TWO = [ROPE[i] for i in (0, 3, 5, 10, 12)]
RUNS = [pytest.param(lens, options, splits, id=f"{lens}-{options}-{splits}", marks=[] if splits == 1 and (
            not options or lens == [1, 1, 1] or lens == [5, 1, 0, 30] and options in IN_TWO) else [pytest.mark.slow])
        for splits in (1, 5) for lens in LENS for options in ROPE]


@pytest.mark.parametrize(("query_lens", "options", "splits"), RUNS)
def test_rope(query_lens, options, splits):
    """The same as rotating first, in one launch and in two: outputs, caches and scales."""
    norm, rotary, form = options.get("norm", False), options.get("rotary"), options.get("form", RopeForm())
    options = {k: v for k, v in options.items() if k not in ("norm", "rotary", "form")}
    shape = {**SMALL, **options}
    pad = dict(pad_tokens=1, pad_reqs=2) if sum(query_lens) > 1 else {}
    case, other = (make_case(query_lens, [n + 40 for n in query_lens], **shape, **pad, expect=False) for _ in range(2))
    dim, dtype, tokens = shape["head_dim"], case.q.dtype, case.q.shape[0]
    angles = torch.rand(tokens, (rotary or dim) // 2, device=DEVICE).mul(6.3)
    if not form.half_tables:
        angles = angles.repeat_interleave(2, dim=1) if form.interleaved else angles.repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [(torch.rand(dim, 2, device=DEVICE) + 0.5).to(dtype)[:, 0] if norm else None for _ in range(2)]
    rope = (cos, sin, *weights, 1e-6)
    m = other.metadata
    rotated = rope_kv_write_eager(other.q, other.k, other.v, *rope, *other.cache.of_layer(0), m.slot_mapping, **form.options())
    prepared = BACKEND.prepare(m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, m.page_size)
    with overridden(DecodeConfig, block_n=16, chunk_min=16, wave=1000 if splits > 1 else 1):
        expected = BACKEND.op(rotated, None, None, *other.arguments(prepared)[3:], **other.options)
        got = BACKEND.rope_op(case.q, case.k, case.v, *rope, *case.arguments(prepared)[3:], **case.options, **form.options())
    # float32: one rotation and one softmax, each to some 1e-6 of numbers of order 10; float16: rounded to 2**-11 twice. A key
    # whose last bit differs may get the next int8 code: 1/127 of its largest number.
    tolerance = 0.05 if "kv_dtype" in options else 2e-2 if dtype == torch.float16 else 2e-5
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert got[: sum(query_lens)].abs().amax(-1).gt(0).all() and not got[sum(query_lens) :].any()
    for mine, theirs in zip(case.cache.of_layer(0), other.cache.of_layer(0), strict=True):
        if mine is not None:
            step = 1 if mine.dtype == torch.int8 else tolerance
            torch.testing.assert_close(mine.float(), theirs.float(), atol=step, rtol=tolerance)


@pytest.mark.slow  # as the kit's opcheck
def test_rope_opcheck():
    case = make_case([1, 1], [5, 9], **SMALL)
    cos, sin = torch.ones(2, 16, device=DEVICE), torch.zeros(2, 16, device=DEVICE)
    torch.library.opcheck(BACKEND.rope_op, (case.q, case.k, case.v, cos, sin, None, None, 0.0, *case.arguments()[3:]),
                          case.options)
    torch.library.opcheck(BACKEND.rope_op, (case.q, case.k, case.v, cos[:, :8], sin[:, :8], None, None, 0.0,
                                            *case.arguments()[3:]), {**case.options, "interleaved": True, "half_tables": True})


def test_caches_that_the_kernels_cannot_read_are_refused():
    for kv_dtype, change, message in (
        (INT8, lambda c: c.v_scale.__setitem__(0, c.v_scale[0].contiguous()), "k_scale and v_scale of the same strides"),
        (INT8, lambda c: (c.k_scale.__setitem__(0, None), c.v_scale.__setitem__(0, None)), "needs k_scale and v_scale"),
        (None, lambda c: c.k.__setitem__(0, c.k[0].transpose(1, 3).contiguous().transpose(1, 3)), "last dim is contiguous"),
    ):
        case = make_case([1], [5], **SMALL, kv_dtype=kv_dtype)
        change(case.cache)
        with pytest.raises(ValueError, match=message):
            run_case(BACKEND, case)


def test_available_says_why_not(monkeypatch):
    assert available(DEVICE) is None
    assert "not on meta" in available(torch.device("meta"))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(common, "INTERPRETED", False)
        assert "after the kernels were loaded" in available(DEVICE)
        assert "no CUDA device" in available(torch.device("cuda"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in available(torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in available(DEVICE)


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 16), (1024, 256), (8192, 256), (700 + 250, 251)])
def test_a_prompt_beside_many_decodes_has_tiles_as_wide_as_alone(tokens, rows):
    """Else each tile of a few tokens reads all keys of the prompt. Most rows of a captured batch are decodes or padding."""
    def widths(num_tokens: int, num_reqs: int) -> set[int]:
        q, cache, ids = torch.empty(num_tokens, 16, 128, dtype=FP16), torch.empty(9, 16, 8, 128, dtype=FP16), torch.empty(
            num_reqs, 64, dtype=torch.int32)
        tables = torch.empty(num_tokens, dtype=torch.int64), ids, torch.empty(num_reqs + 1, dtype=torch.int32), ids[:, 0]
        with recording() as found:
            BACKEND.op(q, None, None, cache, cache, None, None, *tables, None, [], scale=1.0, window=None, softcap=None,
                       chunk=None)
        return {a.block_m for each in found for a in each.arguments if isinstance(a, extend.ExtendTile)}

    assert widths(tokens, rows) == widths(tokens, 1) == {128}
    assert widths(40, 16) == {16}  # pieces of two or three tokens


def test_prompts_alone_launch_no_decode():
    """A step whose sequences all have several tokens has a launch less per layer, with the same result; a graph, which is
    replayed for any batch, has all of them."""
    def kernels(case, **options) -> set[str]:
        with recording() as found:
            run_case(BACKEND, case, **options)
        return {each.name for each in found}

    everything = {"write_kernel", "extend_kernel", "decode_kernel"}
    prompts, mixed = make_case([5, 9], [5, 20], **SMALL, pad_reqs=1), make_case([5, 1], [5, 20], **SMALL)
    assert kernels(prompts) == everything - {"decode_kernel"}
    assert kernels(mixed) == kernels(prompts, graph_key="graph") == everything
    out = run_case(BACKEND, prompts)
    assert (bits(out) == bits(run_case(BACKEND, prompts, graph_key="graph"))).all()
    other = make_case([3, 3], [5, 20], **SMALL)  # of the same shape as ``mixed``, and without single tokens
    with running(Step(mixed.cache, other.metadata)):
        check_output(BACKEND.op(*mixed.arguments([]), **mixed.options), mixed)

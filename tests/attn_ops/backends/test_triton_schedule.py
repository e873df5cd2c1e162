"""Decodes by a schedule: right for any lengths, and no programs for what only the block table has room for."""

from __future__ import annotations

import functools
import random

import pytest
import torch

import quire
from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backends import torch_native
from quire.attn_ops.backends.triton import BACKEND
from quire.attn_ops.conformance.batches import scattered
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from tests.attn_ops.backends.test_triton import DEVICE, SMALL
from tests.attn_ops.cases import check_case, check_output, make_case
from tests.tiny import small_llama, tokens

from quire.attn_ops.backends.triton import decode, mla, schedule  # isort: skip  (after test_triton, which sees to Triton)
from quire.attn_ops.backends.triton.plan import overridden  # isort: skip
from quire.attn_ops.backends.triton.waves import time_of  # isort: skip
from quire.attn_ops.kernels.host import num_sms  # isort: skip

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

SHORT = dict(chunk=16)  # keys per part
#: At least as many programs as the interpreter has multiprocessors (``num_sms``), or a small GPU's share of its own.
MANY = 9 if DEVICE.type == "cpu" else num_sms(DEVICE)


def by_definition(lens: list[int], chunk: int, most: int) -> tuple[int, list[int], list[int]]:
    """Keys per part, extra parts before each item, and the item of each extra part: the smallest power of two times ``chunk``
    with which at most ``most`` are needed."""
    def extra(n: int) -> int:
        return max(-(-n // chunk), 1) - 1

    while sum(map(extra, lens)) > most:
        chunk *= 2
    items = [i for i, n in enumerate(lens) for _ in range(extra(n))]
    return chunk, [sum(map(extra, lens[:i])) for i in range(len(lens))], items


@pytest.mark.parametrize("seed", range(6))
def test_the_schedule(seed):
    """A part that is missing or twice there would be a wrong output."""
    draw = random.Random(seed)
    count, mixed = draw.choice([2, 5, 33, 70]), seed % 2 == 1
    query_lens = [draw.choice([0, 1, 1, 1, 4]) for _ in range(count)] if mixed else [1] * count
    lens = [n and n + draw.choice([0, 3, 40, 500, 3000]) for n in query_lens]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens, rows = int(starts[-1]), count + draw.choice([0, 3])  # the last ones are padding
    if not mixed:
        tokens = rows
    elif tokens <= rows:
        tokens = rows + 1
    tables = (torch.zeros(tokens, dtype=torch.int64), torch.zeros(rows, 1000, dtype=torch.int32),
              torch.nn.functional.pad(starts, (0, rows - count), value=int(starts[-1])),
              torch.tensor(lens + [0] * (rows - count), dtype=torch.int32))
    with overridden(schedule.ScheduleConfig, **SHORT):
        counters, made = BACKEND.prepare(*(t.to(DEVICE) for t in tables), 4)
    served = [n if not mixed or q == 1 else 0 for q, n in zip(query_lens, lens, strict=True)] + [0] * (rows - count)
    most = schedule.extra_parts(min(tokens, rows))
    cuts = [by_definition(served, chunk, most) for chunk in (16, 11, 22)]
    parts = sum(n > 0 for n in served)
    assert not counters.any()
    assert made[:9].tolist() == [n for size, _, items in cuts for n in (size, parts + len(items), sum(served))]
    for rest, (_, before, items) in zip(made[9:].view(3, -1).tolist(), cuts, strict=True):
        assert rest == [*before, *items, *[-1] * (len(rest) - rows - len(items))]


@pytest.fixture
def used(monkeypatch):
    """How many launches went by a schedule."""
    seen, buffers = [], schedule.buffers
    monkeypatch.setattr(schedule, "buffers", lambda plan, *args: seen.append(plan.scheduled) or buffers(plan, *args))
    return lambda: sum(seen)


@pytest.mark.parametrize("features", [
    dict(sinks=True, softcap=4.0),
    *(pytest.param(features, marks=pytest.mark.slow) for features in (
        {}, dict(num_heads=6, head_dim=24, head_dim_v=40), dict(write=False),
        dict(dtype=torch.float16, head_dim=64, kv_dtype=torch.int8),
        dict(dtype=torch.float16, num_heads=8, head_dim=128),
        *(dict(kv_dtype=kind) for kind in sorted(QUANTIZED_KV_DTYPES, key=str))))], ids=str)
def test_decodes(features, used):
    """Short sequences and long ones, tokens that are not alone in their sequence, padding, decodes among prompts."""
    shape = SMALL | features
    rest = [3] * (MANY - 4)
    with overridden(schedule.ScheduleConfig, **SHORT), overridden(decode.DecodeConfig, block_n=16):
        check_case(BACKEND, make_case([1] * (MANY + 1), [1, 17, 150, 33, 2, *rest], **shape))
        check_case(BACKEND, make_case([1] * MANY, [16, 70, 1, 49, *rest], **shape, pad_tokens=2, pad_reqs=2))
        check_case(BACKEND, make_case([3, 1, 0, 0, *[1] * (MANY - 4)], [90, 40, 0, 0, *rest], **shape, pad_reqs=1))
        check_case(BACKEND, make_case([1, 9, 1, *[1] * (MANY - 3)], [70, 40, 49, 5, *rest], **shape, pad_tokens=1))
    assert used() == 4


@pytest.mark.parametrize("cut, places", [(0, 13), (1, 30), (2, 18)])
def test_each_cut(cut, places, used):
    """Whichever way to cut the keys a kernel takes, for the number of programs that run at once, the result is the same."""
    lens = [1, 1024, 33, 2, *[509] * (MANY - 3)]
    found = [by_definition(lens, chunk, 3 * len(lens)) for chunk in (256, 176, 352)]
    parts = [len(lens) + len(items) for _, _, items in found]
    times = [time_of(n * SMALL["num_kv_heads"], places, sum(lens) / n) for n in parts]
    assert MANY > 9 or times.index(min(times)) == cut  # of nine sequences, on a CPU
    with overridden(schedule.ScheduleConfig, chunk=256), overridden(decode.DecodeConfig, block_n=64, places=places):
        check_case(BACKEND, make_case([1] * len(lens), lens, **SMALL))
        check_case(BACKEND, make_case([3, 1, 0, 0, *[1] * (MANY - 4)], [90, 40, 0, 0, *lens[4:-1]], **SMALL, pad_reqs=1))
    assert used() == 2


def test_sequences_that_are_all_long(used):
    """More parts than there are programs for: each has more keys then."""
    with overridden(schedule.ScheduleConfig, **SHORT), overridden(decode.DecodeConfig, block_n=16):
        check_case(BACKEND, make_case([1] * MANY, [130 + i for i in range(MANY)], **SMALL))
    assert used() == 1


def test_with_and_without_what_was_prepared(used):
    """A step makes the schedule once for all layers, and leaves the counters at zero; a call alone makes its own. What was made
    for another batch is refused."""
    case = make_case([1] * MANY, [70, 20, *[33] * (MANY - 2)], **SMALL)
    m = case.metadata
    with overridden(schedule.ScheduleConfig, **SHORT), overridden(decode.DecodeConfig, block_n=16):
        prepared = BACKEND.prepare(m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, m.page_size)
        for given in (prepared, [], prepared):
            check_output(BACKEND.op(*case.arguments(given), **case.options), case)
        assert not prepared[0].any() and used() == 3
        with pytest.raises(ValueError, match=f"batch of 2 sequences, and this one has {MANY}"):
            few = (m.slot_mapping[:2], m.block_table_tensor[:2], m.query_start_loc[:3], m.seq_lens[:2], m.page_size)
            BACKEND.op(*case.arguments(BACKEND.prepare(*few)), **case.options)


@pytest.mark.parametrize("heads", [16, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_mla(heads, used):
    """On the latent cache, as the definition on all keys."""
    latent, nope, dim_v = Latent(32, 16), 8, 8
    site = AttentionSite(layer=0, num_heads=heads, num_kv_heads=heads, head_dim=nope + latent.rope, head_dim_v=dim_v,
                         dtype=torch.float32, scale=0.2, latent=latent)
    lens = [1, 150, 33, 64, *[9] * (MANY - 4)]
    _, meta, pages = scattered([1] * MANY, lens, page_size=4, device=DEVICE)
    outputs = []
    torch.manual_seed(0)
    q, new = torch.randn(MANY, heads, site.head_dim, device=DEVICE), torch.randn(MANY, sum(latent), device=DEVICE)
    kv_b = torch.randn(heads * (nope + dim_v), latent.rank, device=DEVICE) * 0.2
    filled = torch.randn(pages, 4, 1, sum(latent), device=DEVICE)
    tables = (meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens)
    with overridden(schedule.ScheduleConfig, **SHORT):
        for backend in (BACKEND, torch_native.BACKEND, BACKEND):
            cache = PagedKVCache.for_sites([site], num_pages=pages, page_size=4, device=DEVICE)
            cache.k[0].copy_(filled)
            prepared = [] if backend.prepare is None else backend.prepare(*tables, 4)
            outputs.append(backend.mla_op(q, *new.split(latent, dim=1), kv_b, cache.k[0], *tables, prepared, scale=0.2))
    # float32 sums of some 150 products of numbers of order 1, in another order.
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-5, rtol=2e-5)
    assert torch.equal(outputs[0], outputs[2])
    assert used() == (0 if heads == 3 else 2)  # tiles of several tokens are not split by it


@pytest.mark.parametrize("module", [decode, mla], ids=["dense", "latent"])
def test_a_long_block_table_costs_little(module, monkeypatch):
    """A step of 128 sequences of 1024 tokens took a twelfth longer with room for 32768: most programs found no keys."""
    programs, slots, zeros = [], 2 * MANY, functools.partial(torch.zeros, device=DEVICE)
    monkeypatch.setattr(module, "launch", lambda kernel, grid, *args, **options: programs.append(grid[0]))
    case = make_case([1] * slots, [8] * slots, **SMALL, expect=False)
    m = case.metadata
    for context in (64, 40000):
        tables = (m.slot_mapping, m.block_table_tensor.new_zeros(slots, context // 4), m.query_start_loc, m.seq_lens)
        if module is decode:
            BACKEND.op(*case.arguments([])[:7], *tables, None, [], **case.options)
        else:
            cache = zeros(case.cache.num_pages, 4, 1, 48)
            BACKEND.mla_op(zeros(slots, 16, 24), zeros(slots, 32), zeros(slots, 16), zeros(16 * 16, 32), cache, *tables, [],
                           scale=1.0)
    few, many = programs[0], programs[-1]
    heads = 2 if module is decode else 1
    assert slots * heads <= few <= many <= (slots + 128) * heads


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_an_engine(compiler, used):
    """Prompts and decodes of a whole model, step by step on one schedule for all layers."""
    model = small_llama(std=0.3, max_position_embeddings=4096, num_attention_heads=2, num_key_value_heads=1).to(DEVICE)
    prompts = [[3 + i % 50 for i in range(n)] for n in (40, 4, 18, *[3] * (MANY - 3))]
    found, params = [], quire.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for options in (dict(attention="torch_native"), dict(attention="triton", compiler=compiler)):
        with overridden(schedule.ScheduleConfig, **SHORT), quire.Engine(
                model, num_pages=40 * MANY, max_num_seqs=MANY, max_model_len=3000, **options) as engine:
            found.append(tokens(engine.generate(prompts, params)))
    assert found[0] == found[1] and used()

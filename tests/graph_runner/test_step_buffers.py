"""Staging a step: every field against a plain Python reference, alignment, addresses, nothing stale in the padding."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.adapters import TokenAdapters
from quire.graph_runner.forward_mode import ForwardMode
from quire.graph_runner.request import Request, RequestOutput, ScheduledBatch, ScheduledRow
from quire.graph_runner.sampling_params import GenerateParams, SamplingParams
from quire.graph_runner.step_buffers import BatchShape, StepBuffers

PAGE, WIDTH, SLOTS = 4, 6, 8
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1),  # greedy: filters are off
    SamplingParams(temperature=0.7, logprobs=0), SamplingParams(temperature=1.3, top_k=5), SamplingParams(top_p=0.6, min_p=0.2),
    SamplingParams(temperature=1.3, top_k=5, logprobs=2, logprobs_mode="processed_logprobs"),
)


def buffers(num_tokens: int = 64, num_reqs: int = 12, graph_draws: bool = False, total_lens: bool = False,
            adapters: TokenAdapters | None = None) -> StepBuffers:
    return StepBuffers(BatchShape(num_tokens, num_reqs), max_pages_per_seq=WIDTH, max_num_seqs=SLOTS, page_size=PAGE,
                       device=torch.device("cpu"), graph_draws=graph_draws, total_lens=total_lens, adapters=adapters)


def row(slot: int, start: int, count: int, pages: list[int], *, known: int | None = None, last: bool = True,
        params: SamplingParams = PARAMS[0], seed: int = 5) -> ScheduledRow:
    """``count`` tokens from ``start`` on, of a request of which the host knows ``known`` tokens."""
    known = start + count if known is None else known
    ids = [100 * slot + i for i in range(known)]
    r = Request(slot, ids[:1], params, RequestOutput(slot, None, ids[:1]), seed=seed, stop_token_ids=frozenset([7, 9]),
                max_total_tokens=50, slot=slot, pages=pages)
    r.token_ids = ids
    r.num_pending = max(0, start + count - known)
    return ScheduledRow(r, start, count, last)


def batch_of(*rows: ScheduledRow) -> ScheduledBatch:
    decodes = sum(r.num_new == 1 and r.samples for r in rows)
    return ScheduledBatch(rows, sum(r.num_new for r in rows), decodes)


def reference(batch: ScheduledBatch, shape: BatchShape) -> dict[str, list]:
    """See NOTE [Padding]: field by field, in plain Python."""
    f: dict[str, list] = {name: [] for name in (
        "input_ids", "positions", "slot_mapping", "token_source", "logits_indices", "sample_slot", "seed",
        "sample_position", "query_start_loc", "seq_lens", "top_k", "temperature", "top_p", "min_p", "row_slot", "resample",
        "logprob_temperature")}
    f["query_start_loc"] = [0]
    for r in batch.rows:
        q = r.request
        for p in range(r.start, r.start + r.num_new):
            pending = p >= len(q.token_ids)
            f["input_ids"].append(0 if pending else q.token_ids[p])
            f["token_source"].append(q.slot if pending else -1)
            f["positions"].append(p)
            f["slot_mapping"].append(q.pages[p // PAGE] * PAGE + p % PAGE)
        total = r.start + r.num_new
        f["query_start_loc"].append(len(f["input_ids"]))
        f["seq_lens"].append(total)
        f["logits_indices"].append(len(f["input_ids"]) - 1)
        f["sample_slot"].append(q.slot if r.samples else SLOTS)
        f["sample_position"].append(total)
        f["seed"].append(q.seed)
        f["row_slot"].append(q.slot)
        draws = q.params.temperature > 0
        f["temperature"].append(q.params.temperature)
        f["top_k"].append(q.params.top_k if draws else 0)
        f["top_p"].append(q.params.top_p if draws else 1.0)
        f["min_p"].append(q.params.min_p if draws else 0.0)
        f["resample"].append(draws)
        f["logprob_temperature"].append({None: 0, 0: 1, 2: q.params.temperature}[q.params.logprobs])
    for _ in range(shape.num_tokens - len(f["input_ids"])):
        for name, value in (("input_ids", 0), ("positions", 0), ("slot_mapping", -1), ("token_source", -1)):
            f[name].append(value)
    for _ in range(shape.num_reqs - len(batch.rows)):
        for name, value in (("logits_indices", 0), ("sample_slot", SLOTS), ("seed", 0), ("sample_position", 0),
                            ("query_start_loc", batch.num_tokens), ("seq_lens", 0), ("top_k", 0), ("temperature", 0),
                            ("top_p", 1), ("min_p", 0), ("row_slot", SLOTS), ("resample", 0), ("logprob_temperature", 0)):
            f[name].append(value)
    return f


def check(buffer: StepBuffers, batch: ScheduledBatch, shape: BatchShape) -> None:
    """Host arrays and device fields are the reference's, the whole device layout is accounted for, and the rows of the
    block table that the step reads are the requests' pages."""
    host = buffer.fill(batch, shape)
    buffer.upload(shape)
    device = buffer.views(shape)
    want = reference(batch, shape)
    if buffer.total_lens:  # all tokens of the request but the one that this step samples
        want["total_lens"] = [r.request.num_tokens - r.samples for r in batch.rows]
        want["total_lens"] += [0] * (shape.num_reqs - len(batch.rows))
    if buffer.adapters is not None:
        want["adapters"] = [sum({"one": 1, "two": 2}[name] for name in r.request.adapters or ())
                            for r in batch.rows for _ in range(r.num_new)]
        want["adapters"] += [0] * (shape.num_tokens - batch.num_tokens)
    assert host.keys() == device.keys() == want.keys() | {"change_at", "change_page"}
    np.testing.assert_array_equal(device["change_at"].numpy(), host["change_at"])
    np.testing.assert_array_equal(device["change_page"].numpy(), host["change_page"])
    buffer.update_table(buffer.forward_batch(shape))
    check_table(buffer, batch, shape)
    buffer.table.commit()
    for name, values in want.items():
        array = np.asarray(values, dtype=host[name].dtype)
        np.testing.assert_array_equal(host[name], array, err_msg=name)
        np.testing.assert_array_equal(device[name].numpy(), array, err_msg=name)


def check_table(buffer: StepBuffers, batch: ScheduledBatch, shape: BatchShape) -> None:
    """The table that ``forward_batch`` hands to the step, as far as a kernel may read it."""
    table = buffer.forward_batch(shape).metadata.block_table_tensor
    assert tuple(table.shape) == (shape.num_reqs, WIDTH)
    for i, r in enumerate(batch.rows):
        used = pages_for(r.start + r.num_new, PAGE)
        assert table[i, :used].tolist() == r.request.pages[:used]
    assert not table[len(batch.rows) :].any()
    assert not buffer.table.device[SLOTS].any()


MIXED = batch_of(
    row(3, 9, 1, [4, 9, 2], params=PARAMS[3]),
    row(0, 7, 1, [7, 1], known=7, params=PARAMS[2]),  # its token is on the device
    row(5, 0, 6, [11, 3], last=False, known=10),
    row(1, 5, 8, [5, 6, 8, 10], params=PARAMS[4]),
    row(2, 3, 1, [12], last=False, known=6),
)
DECODE = batch_of(row(3, 9, 1, [4, 9, 2]), row(0, 7, 1, [7, 1], known=7, params=PARAMS[1]),
                  row(6, 8, 1, [5, 3, 1], known=8))


def random_batch(rng: random.Random) -> ScheduledBatch:
    """Up to all slots, decode rows first, each with the pages that its tokens need and some to spare."""
    free = list(range(1, SLOTS * WIDTH + 1))
    rng.shuffle(free)
    decodes, others = [], []
    only_decode = rng.random() < 0.4
    for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        decode = only_decode or rng.random() < 0.5
        count = 1 if decode else rng.randint(1, 9)
        start = rng.randint(0, WIDTH * PAGE - count)
        pages = [free.pop() for _ in range(rng.randint(pages_for(start + count, PAGE), WIDTH))]
        known = start if decode and rng.random() < 0.5 else start + count + rng.randint(0, 2 * (not decode))
        made = row(slot, start, count, pages, known=known, last=decode or rng.random() < 0.5, params=rng.choice(PARAMS),
                   seed=rng.randrange(2**63))
        (decodes if decode else others).append(made)
    return ScheduledBatch(decodes + others, sum(r.num_new for r in decodes + others), len(decodes))


@pytest.mark.parametrize("total_lens", [False, True])
def test_fill_random_batches_one_after_another(total_lens: bool) -> None:
    """On one buffer, whose bytes, slots and both host sides hold what larger batches left."""
    rng = random.Random(0)
    adapters = TokenAdapters(torch.nn.Module(), ["one", "two"]) if total_lens else None
    buffer = buffers(100, 14, total_lens=total_lens, adapters=adapters)
    for _ in range(300):
        batch = random_batch(rng)
        for each in batch.rows:
            each.request.adapters = rng.choice([(), ("one",), ("two",), ("one", "two")])
        check(buffer, batch, BatchShape(batch.num_tokens + rng.randint(0, 20), len(batch.rows) + rng.randint(0, 6)))


def test_addresses_do_not_move() -> None:
    """A graph replays addresses: the device fields of a shape, and the table of newest tokens, stay where they are."""
    buffer = buffers()
    shape = BatchShape(16, 8)
    before = {name: t.data_ptr() for name, t in buffer.views(shape).items()} | {"last": buffer.last_tokens.data_ptr()}
    for other in (BatchShape(32, 4), BatchShape(20, 12), shape):
        check(buffer, DECODE, other)
    after = {name: t.data_ptr() for name, t in buffer.views(shape).items()} | {"last": buffer.last_tokens.data_ptr()}
    assert before == after
    start, end = buffer.device_bytes.data_ptr(), buffer.device_bytes.data_ptr() + buffer.device_bytes.numel()
    assert all(start <= address < end for name, address in after.items() if name != "last")
    tables = [buffer.forward_batch(shape).metadata.block_table_tensor.data_ptr() for shape in (shape, BatchShape(20, 12))]
    assert tables == [buffer.table.rows.data_ptr()] * 2
    for name, t in buffer.views(shape).items():  # Inductor copies tensors that are not aligned so, in every piece
        assert t.is_contiguous() and t.data_ptr() % 16 == 0, name


def test_hosts_take_turns() -> None:
    """While the copy of one step may be under way, the next is packed elsewhere."""
    buffer = buffers()
    shape = BatchShape(8, 4)
    first = buffer.fill(DECODE, shape)
    buffer.upload(shape)
    kept = {name: a.copy() for name, a in first.items()}
    second = buffer.fill(batch_of(row(1, 2, 1, [20])), shape)
    assert first["input_ids"].ctypes.data != second["input_ids"].ctypes.data
    for name in kept:
        np.testing.assert_array_equal(first[name], kept[name])
    buffer.upload(shape)
    assert buffer.fill(DECODE, shape)["input_ids"].ctypes.data == first["input_ids"].ctypes.data


def test_forward_batch() -> None:
    """The step as one object over the staged fields: nothing is copied, and nothing differs from the metadata built by hand."""
    buffer = buffers()
    shape = BatchShape(24, 9)
    host = buffer.fill(MIXED, shape)
    buffer.upload(shape)
    made, v = buffer.forward_batch(shape, host, MIXED), buffer.views(shape)
    assert made.forward_mode is ForwardMode.MIXED and made.batch_size == 5 and made.num_token_non_padded == 17
    for got, field in ((made.input_ids, "input_ids"), (made.positions, "positions"), (made.out_cache_loc, "slot_mapping"),
                       (made.seq_lens, "seq_lens"), (made.logits_indices, "logits_indices")):
        assert got.data_ptr() == v[field].data_ptr(), field
    newest = torch.arange(100, 100 + SLOTS + 1)
    want = [100 + s if s >= 0 else i for s, i in zip(v["token_source"].tolist(), v["input_ids"].tolist(), strict=True)]
    assert made.token_ids(newest).tolist() == want and (v["token_source"] >= 0).any()
    meta = made.metadata
    assert (meta.num_reqs, meta.num_actual_tokens, meta.num_tokens, meta.page_size) == (5, 17, 24, PAGE)
    assert (meta.max_query_len, meta.max_seq_len) == (8, 13)
    assert meta.seq_lens.tolist() == meta.seq_lens_cpu.tolist() == [10, 8, 6, 13, 4, 0, 0, 0, 0]
    assert meta.query_start_loc.tolist() == meta.query_start_loc_cpu.tolist() == [0, 1, 2, 8, 16, 17, 17, 17, 17, 17]
    assert meta.positions.tolist() == buffer.views(shape)["positions"].tolist()
    assert meta.slot_mapping.data_ptr() == buffer.views(shape)["slot_mapping"].data_ptr()
    shape = BatchShape(4, 4)
    host = buffer.fill(DECODE, shape)
    made = buffer.forward_batch(shape, host, DECODE)
    assert made.metadata.max_query_len == 1 and made.forward_mode is ForwardMode.DECODE
    # What graphs are captured on: no live row, and bounds of one token.
    made = buffers().forward_batch(BatchShape(4, 4))
    meta = made.metadata
    assert made.forward_mode is ForwardMode.IDLE
    assert meta.seq_lens_cpu.tolist() == [0] * 4 and meta.query_start_loc_cpu.tolist() == [0] * 5
    assert (meta.num_reqs, meta.num_actual_tokens, meta.max_query_len, meta.max_seq_len) == (4, 4, 1, 1)


def sampling_of(buffer: StepBuffers, batch: ScheduledBatch, shape: BatchShape):
    host = buffer.fill(batch, shape)
    buffer.upload(shape)
    return buffer.sampling(shape, host, batch), host


@pytest.mark.parametrize("graph_draws", [False, True])
def test_sampling_flags(graph_draws) -> None:
    buffer = buffers(graph_draws=graph_draws)
    shape = BatchShape(4, 4)
    for chosen, flags, in_graph in (
            ((0, 1), (True, False, False, False), True), ((0, 2), (False, False, False, False), True),
            ((1, 3), (False, True, False, False), False), ((3, 4), (False, True, True, True), False)):
        batch = batch_of(*(row(i, 3, 1, [i + 1], params=PARAMS[i]) for i in chosen))
        tensors, host = sampling_of(buffer, batch, shape)
        draws = [PARAMS[i].temperature > 0 and (i > 2 or not graph_draws) for i in chosen]
        assert host["resample"].tolist() == [*draws, 0, 0]
        assert (tensors is None) == (flags[0] or (in_graph and graph_draws))
        if tensors is None:
            continue
        assert (tensors.all_greedy, tensors.any_top_k, tensors.any_top_p, tensors.any_min_p) == flags
        assert tensors.banned is None
        assert tensors.temperature.tolist() == host["temperature"].tolist()
        assert tensors.seed.tolist() == host["seed"].tolist()
        assert tensors.position.tolist() == host["sample_position"].tolist()


@pytest.mark.parametrize("base", [PARAMS[0], PARAMS[2]], ids=["greedy", "drawn"])
def test_tokens_banned_before_min_tokens(base) -> None:
    """The prompt is one token, so with ``known`` tokens the step samples output token number ``known``."""
    three = replace(base, min_tokens=3)

    def banned(start: int, size: int = 2, **options) -> list:
        made = row(4, start, 1, [1], params=three, **options)
        made.request.num_pending += made.samples  # as the scheduler leaves it
        tensors, host = sampling_of(buffers(graph_draws=True), batch_of(row(1, 3, 1, [2]), made), BatchShape(size, size))
        assert (tensors is None) == (not host["resample"].any())
        return [] if tensors is None or tensors.banned is None else sorted(tensors.banned.tolist())

    # Tokens 1 and 2 of the continuation are there or pending; this step draws the third.
    assert banned(2, known=3) == [[1, 7], [1, 9]]
    assert banned(2, known=2, size=8) == [[1, 7], [1, 9]]
    assert banned(3) == []  # the fourth may end it
    assert banned(1, last=False) == []  # a chunk of a prompt, whose token is dropped


def test_min_p_of_generate_comes_after_top_p() -> None:
    batch = batch_of(*(row(i, 3, 1, [i + 1], params=params) for i, params in enumerate((
        GenerateParams(top_p=0.6, min_p=0.25), SamplingParams(top_p=0.6, min_p=0.25), GenerateParams(min_p=0.25)))))
    tensors, _ = sampling_of(buffers(), batch, BatchShape(4, 4))
    assert tensors.min_p.tolist() == [-0.25, 0.25, 0.25, 0] and tensors.any_min_p and tensors.any_late_min_p


# -- the block table


def test_only_new_pages_are_sent() -> None:
    """And what is left of the room writes into the row that padding reads, which stays null."""
    buffer, shape = buffers(), BatchShape(4, 4)
    request = row(2, 3, 1, [9])
    check(buffer, batch_of(request), shape)
    assert buffer.views(shape)["change_at"].tolist() == [2 * WIDTH] + [SLOTS * WIDTH] * 3
    request.request.pages += [4]
    for change in ([2 * WIDTH + 1], []):
        check(buffer, batch_of(ScheduledRow(request.request, 4, 1, True)), shape)
        assert buffer.views(shape)["change_at"].tolist() == change + [SLOTS * WIDTH] * (4 - len(change))
    # A step has room for the pages that its own tokens need; after failures there can be more.
    buffer = buffers()
    assert len(buffer.views(BatchShape(2, 2))["change_at"]) == 2
    check(buffer, batch_of(row(0, 20, 1, [1, 2, 3, 4, 5, 6]), row(3, 8, 1, [9, 8, 7, 11])), BatchShape(2, 2))


def test_a_step_that_failed_leaves_nothing_out() -> None:
    """Whether or not its pages reached the device, the next step of the request has them; so has another in its slot."""
    for reached in (False, True):
        buffer, shape = buffers(), BatchShape(4, 4)
        request = row(2, 0, 4, [9])
        check(buffer, batch_of(request), BatchShape(8, 4))
        request.request.pages += [4]
        batch = batch_of(ScheduledRow(request.request, 4, 1, True))
        buffer.fill(batch, shape)
        buffer.upload(shape)
        if reached:
            buffer.update_table(buffer.forward_batch(shape))
        # No commit: the launch failed here.
        other = batch_of(row(5, 3, 1, [7]))
        check(buffer, other, shape)
        check(buffer, batch, shape)
        buffer.fill(batch_of(row(2, 3, 1, [6])), shape)  # its slot goes to another, whose first step fails as well
        check(buffer, batch_of(row(2, 7, 1, [8, 3])), shape)


def test_interrupted_while_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, batch, shape = buffers(), batch_of(row(0, 20, 1, [1, 2, 3, 4, 5, 6]), row(3, 8, 1, [9, 8, 7])), BatchShape(2, 2)
    note, calls = buffer.table.note, []

    def interrupted(slot: int, pages: list[int]) -> None:
        calls.append(slot)
        if len(calls) == 2:
            raise KeyboardInterrupt
        note(slot, pages)

    monkeypatch.setattr(buffer.table, "note", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.fill(batch, shape)
    check(buffer, batch, shape)


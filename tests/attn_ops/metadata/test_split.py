"""Where decodes end and prefills begin: a wrong border sends a prefill through a decode kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops import metadata
from tests.attn_ops.metadata.batches import make_batch


def test_rows_of_padding_end_no_run_of_decodes() -> None:
    """vLLM's page says (3, 1, 6, 2) here: a padded speculative decode batch would leave its captured graph."""
    meta = replace(make_batch([2, 2, 2, 0], [5, 5, 5, 5]), num_actual_tokens=8)
    assert metadata.split_decodes_and_prefills(meta, 3, require_uniform=True) == (4, 0, 8, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
def test_split_against_a_loop(lens, threshold, uniform) -> None:
    first, live = len(lens), [n for n in lens if n]
    for i, n in enumerate(lens):
        if n > threshold or (uniform and n not in (0, live[0] if live else 0)):
            first = i
            break
    meta = make_batch(lens, [n + 3 for n in lens]).padded(sum(lens) + 2, len(lens) + 2)
    assert metadata.split_decodes_and_prefills(meta, threshold, uniform) == (
        first, len(lens) - first, sum(lens[:first]), sum(lens[first:]))


def test_three_regions() -> None:
    meta = make_batch([1, 2, 4, 5, 6], [10, 11, 20, 5, 6])
    assert metadata.split_decodes_prefills_and_extends(meta, 3) == (2, 1, 2, 3, 4, 11)
    assert metadata.split_decodes_prefills_and_extends(make_batch([1, 1], [4, 5])) == (2, 0, 0, 2, 0, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 9), st.integers(0, 3))
def test_prefill_chunks(lens, more, first) -> None:
    """Each fits the workspace, together they are all rows in order, and none could take the next row too."""
    size = max([1, *lens]) + more
    chunks = metadata.split_prefill_chunks(lens, size, first)
    assert [r for begin, end in chunks for r in range(begin, end)] == list(range(first, first + len(lens)))
    for begin, end in chunks:
        assert sum(lens[begin - first : end - first]) <= size
        assert end - first == len(lens) or sum(lens[begin - first : end - first + 1]) > size


def test_a_sequence_larger_than_the_workspace() -> None:
    with pytest.raises(ValueError, match="sequence 4 has 9 tokens, more than the workspace of 8"):
        metadata.split_prefill_chunks([3, 9], 8, first=3)


@dataclass
class Batch:
    """An engine's batch with per-row state."""

    req_ids: list[str]
    num_computed_tokens_cpu: np.ndarray
    num_prompt_tokens: np.ndarray | None = None

    def swap_states(self, i1, i2) -> None:
        ids = self.req_ids
        ids[i1], ids[i2] = ids[i2], ids[i1]
        for name in vars(self).keys() - {"req_ids"}:
            if (values := getattr(self, name)) is not None:
                values[[i1, i2]] = values[[i2, i1]]


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int]


def reorder(rows, threshold=1, prompts=None, known=True):
    """The order of the rows (scheduled, computed); ``known``: whether the batch says how many tokens are computed."""
    batch = Batch([str(i) for i in range(len(rows))], np.array([c for _, c in rows]),
                  None if prompts is None else np.array(prompts))
    if not known:
        del batch.num_computed_tokens_cpu, batch.num_prompt_tokens
    output = Output({str(i): n for i, (n, _) in enumerate(rows)})
    moved = metadata.reorder_batch_to_split_decodes_and_prefills(batch, output, threshold)
    assert not metadata.reorder_batch_to_split_decodes_and_prefills(batch, output, threshold)
    order = [int(i) for i in batch.req_ids]
    assert not known or [rows[i][1] for i in order] == batch.num_computed_tokens_cpu.tolist()
    assert moved == (order != list(range(len(rows))))
    return order


@pytest.mark.parametrize(("rows", "want"), [
    ([(100, 0), (10, 50), (1, 10)], [2, 1, 0]), ([(100, 0), (10, 50), (200, 0), (20, 75)], [3, 1, 2, 0]),
    ([(100, 0), (1, 0), (50, 100), (1, 10)], [3, 2, 0, 1]),
    ([(1, 0), (1, 0), (1, 50), (200, 0)], [2, 1, 0, 3]),  # a prompt of one token is a prefill
    ([(100, 5), (1, 5), (200, 5), (1, 5)], [3, 1, 2, 0]), ([(1, 5), (1, 5), (100, 5), (200, 5)], [0, 1, 2, 3]),
    # Those of vLLM's page, which moves the last decode to the first prefill's place.
    ([(7, 5), (1, 5), (1, 5)], [2, 1, 0]), ([(5, 5), (1, 5), (1, 5), (1, 5)], [3, 1, 2, 0]),
])
def test_reorder_examples(rows, want) -> None:
    assert reorder(rows) == want


@pytest.mark.parametrize(("lens", "threshold", "want"), [
    ([100, 1, 200, 1], 1, [3, 1, 2, 0]), ([1, 1, 100, 200], 1, [0, 1, 2, 3]), ([100, 200, 1, 1], 1, [3, 2, 1, 0]),
    ([7, 1, 1], 1, [2, 1, 0]), ([5, 1, 1, 1], 1, [3, 1, 2, 0]), ([1, 7, 1, 7, 1, 7, 1], 1, [0, 6, 2, 4, 3, 5, 1]),
    ([2, 3, 5, 6], 4, [0, 1, 2, 3]), ([], 1, []),
])
def test_reorder_of_a_batch_that_knows_no_computed_tokens(lens, threshold, want) -> None:
    """The examples of vLLM's page, whose batch has lengths only."""
    assert reorder([(n, 0) for n in lens], threshold, known=False) == want


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    """Its state is that of a prompt in progress; vLLM's newer versions say so."""
    assert reorder([(1, 10), (1, 20)], prompts=[30, 20]) == [1, 0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=9), st.integers(1, 4))
def test_reorder_properties(rows, threshold) -> None:
    """A permutation into decodes, extends, prefills that leaves alone what is in its place."""
    order = reorder(rows, threshold)
    assert order == metadata.decode_first_order([n for n, _ in rows], [c for _, c in rows], decode_threshold=threshold).tolist()
    region = [3 if c == 0 else 2 if n > threshold else 0 for n, c in rows]
    assert sorted(order) == list(range(len(rows))) and [region[i] for i in order] == sorted(region)
    assert all(order[i] == i for i in range(len(rows)) if region[i] == sorted(region)[i])

"""Buckets: the default ladders, user lists, and that a picked bucket is the smallest that holds the batch."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.graph_runner.buckets import POLICIES, decode_buckets, pick_bucket, token_buckets

TO_256 = [1, 2, 4, *range(8, 257, 8)]
TO_512 = [*TO_256, *range(272, 513, 16)]


@pytest.mark.parametrize(("max_num_seqs", "expected"), [
    (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (256, TO_256), (257, [*TO_256, 257]),
    (512, TO_512), (600, [*TO_512, 544, 576, 600]), (1024, [*TO_512, *range(544, 1025, 32)]),
])
def test_default_decode_buckets(max_num_seqs: int, expected: list[int]) -> None:
    assert decode_buckets(max_num_seqs) == expected


def test_sizes_of_the_user_are_taken_unchanged() -> None:
    assert decode_buckets(20, [16, 2, 2]) == decode_buckets(20, (2, 16)) == [2, 16]
    assert token_buckets(40, [40, 1]) == [1, 40]


def test_default_token_buckets() -> None:
    expected = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1152, 2049, 128),
        *range(2304, 4097, 256), *range(4608, 8193, 512),
    ]
    assert token_buckets(8192) == expected
    assert token_buckets(8200) == [*expected, 8200]
    assert token_buckets(3) == [3]
    assert token_buckets(40) == [4, 8, 12, 16, 20, 24, 28, 32, 40]
    # A step of 1025 tokens would run a quarter longer if it were padded to 1280.
    assert max(b / (a + 1) for a, b in zip(expected, expected[1:], strict=False) if a >= 128) < 1.126


@pytest.mark.parametrize("buckets", [decode_buckets, token_buckets])
@pytest.mark.parametrize(("maximum", "sizes", "message"), [
    (0, None, "must be an integer of at least 1, got 0"), (2.0, None, "must be an integer of at least 1, got 2.0"),
    (True, None, "must be an integer of at least 1, got True"),
    (8, [], "is empty; give at least one, or None for the default list"),
    (8, [4, 0], "0 in the list to capture must be an integer of at least 1"),
    (8, [4, -1], "-1 in the list to capture must be an integer of at least 1"),
    (8, ["4"], "'4' in the list to capture must be an integer"),
    (8, [4, 9], "9 in the list to capture is larger than any batch can be (max_num"),
])
def test_refuses(buckets, maximum: object, sizes: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        buckets(maximum, sizes)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40_000), st.sampled_from([None, *POLICIES]))
def test_ladder_properties(maximum: int, policy: str | None) -> None:
    """Each ends with the maximum. SGLang 0.5.2's list with cuda_graph_max_bs, and vLLM's, may miss it: the largest batches
    would have no graph."""
    for buckets, step in ((decode_buckets(maximum, policy), 32), (token_buckets(maximum, policy), 512)):
        assert buckets == sorted(set(buckets)) and buckets[-1] == maximum
        assert policy is not None or max(b - a for a, b in zip([0, *buckets], buckets, strict=False)) <= step


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(1, 600), min_size=1), st.integers(0, 700))
def test_pick_is_the_smallest_that_fits(sizes: set[int], n: int) -> None:
    fits = [size for size in sizes if size >= n]
    assert pick_bucket(decode_buckets(600, sizes), n) == (min(fits) if fits else None)


# Named lists.


def test_named_lists() -> None:
    assert decode_buckets(20, "sglang") == [1, 2, 4, 8, 12, 16, 20]
    big = decode_buckets(600, "sglang")
    assert big[-6:] == [480, 496, 512, 544, 576, 600] and big[5:8] == [16, 24, 32]
    assert decode_buckets(512, "vllm") == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert len(decode_buckets(512, "vllm")) == 51
    assert decode_buckets(100, "powers") == [1, 2, 4, 8, 16, 32, 64, 100]
    assert token_buckets(40, "powers") == [1, 2, 4, 8, 16, 32, 40] and token_buckets(40, "vllm") == [1, 2, 4, 8, 16, 24, 32, 40]
    assert token_buckets(300, "sglang") == token_buckets(300) and 1152 not in token_buckets(2048, "sglang")
    for buckets in (decode_buckets, token_buckets):
        with pytest.raises(ValueError, match="no list of capture sizes is called 'squares'; there are sglang, vllm, powers"):
            buckets(8, "squares")

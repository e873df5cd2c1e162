"""Buckets: the default ladders, user lists, and that a picked bucket is the smallest that holds the batch."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.graph_runner.buckets import decode_buckets, decode_token_counts, pick_bucket, token_buckets

TO_256 = [1, 2, 4, *range(8, 257, 8)]
TO_512 = [*TO_256, *range(272, 513, 16)]


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (256, TO_256),
        (257, [*TO_256, 257]),
        (512, TO_512),
        (600, [*TO_512, 544, 576, 600]),
        (1024, [*TO_512, *range(544, 1025, 32)]),
    ],
)
def test_default_decode_buckets(max_num_seqs: int, expected: list[int]) -> None:
    assert decode_buckets(max_num_seqs) == expected


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"max_num_seqs": 5, "padding": False}, [1, 2, 3, 4, 5]),
        ({"max_num_seqs": 5, "padding": False, "multiple_of": 2}, [2, 4, 6]),
        ({"max_num_seqs": 20, "multiple_of": 2}, [2, 4, 8, 16, 20]),
        ({"max_num_seqs": 20, "multiple_of": 16}, [16, 32]),  # 20 is rounded up, not dropped
        ({"max_num_seqs": 20, "sizes": [16, 2, 2]}, [2, 16]),  # taken as it is: nothing is added
        ({"max_num_seqs": 20, "sizes": (16, 2), "padding": False}, [2, 16]),
        ({"max_num_seqs": 21, "sizes": [22], "multiple_of": 2}, [22]),  # holds a batch of 21
    ],
)
def test_decode_bucket_options(kwargs: dict, expected: list[int]) -> None:
    assert decode_buckets(**kwargs) == expected


def test_default_token_buckets() -> None:
    expected = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256),
        *range(4608, 8193, 512),
    ]
    assert token_buckets(8192) == expected
    assert token_buckets(8200) == [*expected, 8200]
    assert token_buckets(3) == [3]
    assert token_buckets(40) == [4, 8, 12, 16, 20, 24, 28, 32, 40]
    assert token_buckets(40, multiple_of=8) == [8, 16, 24, 32, 40]
    assert token_buckets(40, sizes=[40, 1]) == [1, 40]


@pytest.mark.parametrize("buckets", [decode_buckets, token_buckets])
@pytest.mark.parametrize(
    ("maximum", "kwargs", "message"),
    [
        (0, {}, "must be an integer of at least 1, got 0"),
        (2.0, {}, "must be an integer of at least 1, got 2.0"),
        (True, {}, "must be an integer of at least 1, got True"),
        (8, {"multiple_of": 0}, "multiple_of must be an integer of at least 1, got 0"),
        (8, {"sizes": []}, "is empty; give at least one, or None for the default list"),
        (8, {"sizes": [4, 0]}, "0 in the list to capture must be an integer of at least 1"),
        (8, {"sizes": [4, -1]}, "-1 in the list to capture must be an integer of at least 1"),
        (8, {"sizes": ["4"]}, "'4' in the list to capture must be an integer"),
        (8, {"sizes": [3], "multiple_of": 4}, "3 in the list to capture is not a multiple of 4; the next one is 4"),
        (8, {"sizes": [4, 9]}, "9 in the list to capture is larger than any batch can be (max_num"),
    ],
)
def test_refuses(buckets, maximum: object, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        buckets(maximum, **kwargs)


def test_speculative_tokens() -> None:
    assert decode_token_counts([1, 2, 8]) == [1, 2, 8]
    assert decode_token_counts([1, 2, 8], tokens_per_seq=4) == [4, 8, 32]
    with pytest.raises(ValueError, match="tokens_per_seq must be an integer of at least 1, got 0"):
        decode_token_counts([1], tokens_per_seq=0)


def test_pick_exact() -> None:
    assert pick_bucket([2, 4, 8], 3) == 4
    assert pick_bucket([2, 4, 8], 3, exact=True) is None
    assert pick_bucket([2, 4, 8], 4, exact=True) == 4
    assert pick_bucket([2, 4, 8], 9) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2048), st.integers(1, 16), st.booleans())
def test_decode_ladder_properties(max_num_seqs: int, multiple_of: int, padding: bool) -> None:
    buckets = decode_buckets(max_num_seqs, padding=padding, multiple_of=multiple_of)
    assert buckets == sorted(set(buckets))
    assert all(size % multiple_of == 0 for size in buckets)
    assert max_num_seqs <= buckets[-1] < max_num_seqs + multiple_of
    # Rounding a rung up can add at most `multiple_of - 1` to a step of the ladder.
    steps = [b - a for a, b in zip([0, *buckets], buckets, strict=False)]
    assert max(steps) <= (multiple_of if not padding else max(32, multiple_of) + multiple_of - 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40_000), st.integers(1, 16))
def test_token_ladder_properties(maximum: int, multiple_of: int) -> None:
    buckets = token_buckets(maximum, multiple_of=multiple_of)
    assert buckets == sorted(set(buckets))
    assert all(size % multiple_of == 0 for size in buckets)
    assert maximum <= buckets[-1] < maximum + multiple_of


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(1, 600), min_size=1), st.integers(0, 700))
def test_pick_is_the_smallest_that_fits(sizes: set[int], n: int) -> None:
    buckets = decode_buckets(600, sizes=sizes)
    fits = [size for size in sizes if size >= n]
    assert pick_bucket(buckets, n) == (min(fits) if fits else None)
    assert pick_bucket(buckets, n, exact=True) == (n if n in sizes else None)

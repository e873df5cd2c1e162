"""Text of a token stream: characters of several tokens, special tokens, stop strings; the pieces make up the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_runner.detokenizer import Detokenizer
from tests.tiny import load_tokenizer

TEXTS = (
    "Hello, world!", "a 😀 b 👩‍👩‍👧‍👦 c", "今天天气很好，我们去公园吧。",
    "naïve café — “quoted” …", "Привет, мир", "مرحبا", "e\u0301 \u200b x",
    "\n\n  two  spaces\tand a tab ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "",
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def pieces(tokenizer, prompt: list[int], ids: list[int], step: int = 1, **options) -> list[str]:
    d = Detokenizer(tokenizer, prompt, options.pop("skip_special_tokens", True), **options)
    found = []
    for i in range(0, len(ids), step):
        found.append(d.add(ids[i : i + step]))
        assert d.text == "".join(found)
    found.append(d.flush())
    assert d.text == "".join(found)
    return found


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_make_up_the_text(text, step, tokenizer) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    for prompt in ([], tokenizer("The cat")["input_ids"], tokenizer("好")["input_ids"]):
        found = pieces(tokenizer, prompt, ids, step)
        assert "".join(found) == text
        assert "\ufffd" not in "".join(found)


def test_no_half_characters(tokenizer) -> None:
    """A character comes whole, with its last token."""
    ids = tokenizer("😀")["input_ids"]
    assert len(ids) == 4  # bytes: the tokenizer has never seen it
    assert pieces(tokenizer, [], ids) == ["", "", "", "😀", ""]
    assert pieces(tokenizer, [], ids[:3]) == ["", "", "", "\ufffd"]  # cut off there: what transformers prints
    assert tokenizer.decode(ids[:3]) == "\ufffd"


def test_bytes_that_never_become_a_character(tokenizer) -> None:
    broken = tokenizer("😀")["input_ids"][:2] + tokenizer(" ok. And so on")["input_ids"]
    assert "".join(pieces(tokenizer, [], broken)) == tokenizer.decode(broken) == "\ufffd ok. And so on"


def test_special_tokens(tokenizer) -> None:
    ids = tokenizer("one")["input_ids"] + [0] + tokenizer("two")["input_ids"]
    assert "".join(pieces(tokenizer, [], ids)) == "onetwo"
    assert "".join(pieces(tokenizer, [], ids, skip_special_tokens=False)) == "one<|endoftext|>two"


@settings(max_examples=60, deadline=None)
@given(prompt=st.lists(st.integers(0, 1847), max_size=9), ids=st.lists(st.integers(0, 1847), max_size=30))
def test_any_tokens(prompt, ids) -> None:
    """Whatever a model writes: the pieces are what decoding prompt and continuation together adds to the prompt."""
    tokenizer = TOKENIZER
    before, whole = (tokenizer.decode(x, skip_special_tokens=True) for x in (prompt, prompt + ids))
    if before.endswith("\ufffd"):  # the prompt ends inside a character, whose end is then not ours
        return
    assert "".join(pieces(tokenizer, prompt, ids)) == whole[len(before) :]


TOKENIZER = load_tokenizer()


class Words:
    """A tokenizer like SentencePiece's: the first token of a decoding loses its space."""

    words = ["▁the", "▁cat", "s", "▁sat", "."]

    def decode(self, ids, skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")


def test_space_before_the_first_token() -> None:
    assert pieces(Words(), [0], [1, 2, 3, 4]) == [" cat", "s", " sat", ".", ""]
    assert pieces(Words(), [], [1, 2, 3, 4]) == ["cat", "s", " sat", ".", ""]


def test_cost_does_not_grow_with_the_length() -> None:
    lengths: list[int] = []

    class Counting(Words):
        def decode(self, ids, skip_special_tokens: bool) -> str:
            lengths.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    pieces(Counting(), [0] * 500, [1, 2, 3, 4] * 100)
    assert max(lengths) <= 19  # the window and the new token
    assert len(lengths) < 1.2 * 400  # and hardly more than one decoding a token


@pytest.mark.parametrize("shown", ["", "\ufffd"])
def test_tokens_that_show_nothing_cost_nothing_later(shown) -> None:
    """Special tokens that are left out, or bytes that never become a character: what is decoded again stays short."""
    lengths: list[int] = []

    class Mute(Words):
        def decode(self, ids, skip_special_tokens: bool) -> str:
            lengths.append(len(ids))
            return "".join(shown if i == 9 else "ab"[i] for i in ids)

    text = Detokenizer(Mute(), [0], True)
    pieces_ = [text.add([i]) for i in [1, *[9] * 200, 0]]
    assert max(lengths) <= 80  # what is waited for, twice, and the context
    assert "".join(pieces_) + text.flush() == text.text == "b" + shown * 200 + "a"


# -- stop strings


def stream(text_pieces: list[str], stop: tuple[str, ...], include: bool = False, may_stop_from: int = 0) -> tuple:
    """(pieces shown, the stop string found) for a tokenizer whose token i is ``text_pieces[i]``."""

    class Pieces:
        def decode(self, ids, skip_special_tokens: bool) -> str:
            return "".join(text_pieces[i] for i in ids)

    d = Detokenizer(Pieces(), [], True, stop, include)
    shown = []
    for i in range(len(text_pieces)):
        shown.append(d.add([i], may_stop=i >= may_stop_from))
        if d.stopped_by is not None:
            break
    rest = d.flush()
    assert d.text == "".join(shown) + rest
    return shown, rest, d.stopped_by


@pytest.mark.parametrize(("texts", "stop", "shown", "rest", "found"), [
    (["ab", "cd"], ("bc",), ["a", ""], "", "bc"),  # spans two tokens: its beginning was held back
    (["ab", "xd"], ("bc",), ["a", "bxd"], "", None),
    (["ab"], ("bc",), ["a"], "b", None),  # the text ends there
    (["xyz\n", "\n", "more"], ("\n\n",), ["xyz", ""], "", "\n\n"),
    (["a", "b", "c", "d"], ("bcd", "zz"), ["a", "", "", ""], "", "bcd"),
    (["a", "b", "c", "e"], ("bcd",), ["a", "", "", "bce"], "", None),
    (["aa", "a", "ab"], ("aab",), ["", "a", "a"], "", "aab"),  # its beginning repeats
    (["one two three"], ("three", "two"), ["one "], "", "two"),  # the first in the text, not in the list
    (["abc"], ("abc",), [""], "", "abc"),
    (["a", "b"], (), ["a", "b"], "", None),
])
def test_stop_strings(texts, stop, shown, rest, found) -> None:
    assert stream(texts, stop) == (shown, rest, found)


def test_stop_string_in_the_output() -> None:
    assert stream(["ab", "cde"], ("bc",), include=True) == (["a", "bc"], "", "bc")


def test_stop_strings_before_min_tokens() -> None:
    texts = ["x.", "y.", "z."]
    assert stream(texts, (".",)) == (["x"], "", ".")
    assert stream(texts, (".",), may_stop_from=1) == (["x.", "y"], "", ".")
    # One that came too early does not count later, and one that is completed in time does.
    assert stream(["a.b", "c", "d"], (".b", "bcd"), may_stop_from=2) == (["a", ".", ""], "", "bcd")
    assert stream(["a.b", "c", "d"], (".b",), may_stop_from=1) == (["a.b", "c", "d"], "", None)
    assert stream(["a.b", "c", "d"], (".b", "xyz"), may_stop_from=1) == (["a", ".bc", "d"], "", None)


def test_stop_strings_at_random() -> None:
    """Against the plain definition: the text up to the first place where a stop string is complete."""
    rng = random.Random(0)
    for _ in range(500):
        texts = ["".join(rng.choices("ab", k=rng.randint(0, 4))) for _ in range(rng.randint(1, 8))]
        stop = tuple({"".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(rng.randint(1, 2))})
        shown, rest, found = stream(texts, stop)
        whole = ""
        expected = None
        for t in texts:
            whole += t
            hits = [(whole.find(s), s) for s in stop if s in whole]
            if hits:
                expected = min(hits)
                break
        if expected is None:
            assert ("".join(shown) + rest, found) == (whole, None)
        else:
            at = expected[0]
            assert "".join(shown) + rest == whole[:at]
            assert found in [s for i, s in hits if i == at]

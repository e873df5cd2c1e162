"""Text of a token stream: characters of several tokens, special tokens, stop strings; the pieces make up the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from quire.graph_runner.detokenizer import Detokenizer
from tests.tiny import load_tokenizer

TEXTS = (
    "Hello, world!", "a 😀 b 👩‍👩‍👧‍👦 c", "今天天气很好，我们去公园吧。",
    "naïve café — “quoted” …", "Привет, мир", "مرحبا", "e\u0301 \u200b x",
    "\n\n  two  spaces\tand a tab ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "",
)


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
    broken = tokenizer("😀")["input_ids"][:2] + tokenizer(" ok. And so on")["input_ids"]
    assert "".join(pieces(tokenizer, [], broken)) == tokenizer.decode(broken) == "\ufffd ok. And so on"


def test_special_tokens(tokenizer) -> None:
    ids = tokenizer("one")["input_ids"] + [0] + tokenizer("two")["input_ids"]
    assert "".join(pieces(tokenizer, [], ids)) == "onetwo"
    assert "".join(pieces(tokenizer, [], ids, skip_special_tokens=False)) == "one<|endoftext|>two"


@settings(max_examples=60, deadline=None)
@given(prompt=st.lists(st.integers(0, 1847), max_size=9), ids=st.lists(st.integers(0, 1847), max_size=30))
def test_any_tokens(prompt, ids) -> None:
    """Whatever a model writes: the pieces are what decoding prompt and continuation together adds to the prompt. Of a
    character that the prompt begins the end is not ours: the prompt has it already, unfinished."""
    tokenizer = TOKENIZER
    before, whole = (tokenizer.decode(x, skip_special_tokens=True) for x in (prompt, prompt + ids))
    assert "".join(pieces(tokenizer, prompt, ids)) == whole[len(before) :]


TOKENIZER = load_tokenizer()


# -- tokenizers with a token for each byte


def byte_fallback(layout: str):
    """Tokenizers laid out as those of Llama 2 and Mistral, or of Gemma: characters that they do not know become bytes."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    vocab |= {token: len(vocab) + i for i, token in enumerate(["\u2581", "\u2581a", *"abc.!?"])}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    spaces = decoders.Replace("\u2581", " ")
    if layout == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.decoder = decoders.Sequence(
            [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        made.normalizer = normalizers.Replace(" ", "\u2581")
        made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


BYTE_FALLBACK = {layout: byte_fallback(layout) for layout in ("llama", "gemma")}
bytes_too = pytest.mark.parametrize("layout", BYTE_FALLBACK)
CHARACTERS = st.sampled_from(["😀", "🎉", "好", "é", "a", "b", " ", "."])


def bytes_of(data: bytes) -> list[int]:
    return [b + 1 for b in data]


@bytes_too
def test_bytes_become_characters(layout) -> None:
    """However long the run, each character comes with its last byte, at once."""
    tokenizer, text = BYTE_FALLBACK[layout], "😀🎉好é" * 8
    prompt = tokenizer("a 🎉🎉")["input_ids"]
    found = pieces(tokenizer, prompt, bytes_of(text.encode()))
    assert found == [p for c in text for p in (*[""] * (len(c.encode()) - 1), c)] + [""]
    assert tokenizer.decode(prompt + bytes_of(text.encode())) == "a 🎉🎉" + text  # and the decoder knows them all


@bytes_too
def test_prompt_whose_character_is_never_finished(layout) -> None:
    tokenizer = BYTE_FALLBACK[layout]
    prompt, cut = tokenizer("a 😀😀")["input_ids"][:-2], tokenizer("a !")["input_ids"]
    assert "".join(pieces(tokenizer, prompt, [])) == ""
    assert "".join(pieces(tokenizer, prompt, bytes_of(b"\x9f"))) == "\ufffd"
    assert "".join(pieces(tokenizer, prompt, cut)) == (" " if layout == "llama" else "") + "a !"


@bytes_too
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "text", "found"), [
    (("🎉",), "😀😀é", "🎉"), (("😀",), "", "😀"), (("é🎉", "好"), "😀😀", "é🎉"), (("x", "😀é"), "😀", "😀é"),
    (("好🎉", "好"), "😀😀é🎉", "好"),
])
def test_stop_strings_of_bytes(stop, text, found, include, layout) -> None:
    tokenizer = BYTE_FALLBACK[layout]
    d = Detokenizer(tokenizer, tokenizer("a 😀好")["input_ids"], True, stop, include)
    for i in bytes_of("😀😀é🎉好a".encode()):
        d.add([i])
        if d.stopped_by is not None:
            break
    assert (d.stopped_by, d.text) == (found, text + found * include)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(("stop", "skip", "text", "found"), [
    (("<|im_end|>",), True, "Hello, world", "<|im_end|>"), (("<|im_end|>",), False, "Hello, world", "<|im_end|>"),
    (("orl", "<|im_end|>"), True, "Hello, w", "orl"), (("d and", "<|im_end|>"), True, "Hello, world", "<|im_end|>"),
    (("<|other|>",), True, "Hello, world and more", None)])
def test_stops_that_are_special_tokens(stop, skip, text, found, step) -> None:
    """The text leaves them out, but they end it: answers of chat models would else run on after their turn."""
    tokenizer = load_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_end|>"]})
    ids = tokenizer("Hello, world<|im_end|> and more", add_special_tokens=False)["input_ids"]
    d = Detokenizer(tokenizer, tokenizer("The")["input_ids"], skip, stop)
    for i in range(0, len(ids), step):
        d.add(ids[i : i + step])
        if d.stopped_by is not None:
            break
    assert d.text + d.flush() == text and d.stopped_by == found
    d = Detokenizer(tokenizer, [], skip, stop)
    d.add(ids, may_stop=False)
    assert d.stopped_by is None
    d, given = Detokenizer(tokenizer, [], skip, stop, include_stop=True), ""
    for i in ids:
        given += d.add([i]) if d.stopped_by is None else ""
    assert given + d.flush() == d.text == text + (found or "")


def test_stops_and_a_tokenizer_that_looks_up_no_text() -> None:
    """An ordinary stop string is no token: asking for one must not end the call."""
    class Strict:
        def __init__(self) -> None:
            self.decode, self.vocabulary = load_tokenizer().decode, load_tokenizer().get_vocab()

        def convert_tokens_to_ids(self, text: str) -> int:
            return self.vocabulary[text]

    ids = load_tokenizer()("Hello, world", add_special_tokens=False)["input_ids"]
    d = Detokenizer(Strict(), [], True, (", w",))
    d.add(ids)
    assert (d.text, d.stopped_by) == ("Hello", ", w")


@bytes_too
@settings(max_examples=60, deadline=None)
@given(prompt=st.lists(CHARACTERS, max_size=9), text=st.lists(CHARACTERS, max_size=20), cut=st.integers(0, 3),
       step=st.integers(1, 5))
def test_any_characters_of_bytes(layout, prompt, text, cut, step) -> None:
    tokenizer = BYTE_FALLBACK[layout]
    ids = tokenizer("".join(prompt + text))["input_ids"]
    at = max(len(tokenizer("".join(prompt))["input_ids"]) - cut, 0)
    mine = next(i for i in range(at, len(ids) + 1) if not tokenizer.decode(ids[:i]).endswith("\ufffd"))
    assert "".join(pieces(tokenizer, ids[:at], ids[at:], step)) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:mine])) :]


def text_of_bytes(tokenizer, ids: list[int]) -> str:
    """What the decoder makes of the tokens, but that bytes which are no character leave the ones before them alone."""
    text, run = "", b""
    for token in [*tokenizer.convert_ids_to_tokens(ids), ""]:
        if token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        good = max(i for i in range(len(run) + 1) if run[:i].decode(errors="ignore").encode() == run[:i])
        text += run[:good].decode() + "\ufffd" * (len(run) - good) + token
        run = b""
    return text.replace("\u2581", " ")


@bytes_too
@settings(max_examples=100, deadline=None)
@given(prompt=st.lists(CHARACTERS, max_size=9),
       ids=st.lists(st.one_of(CHARACTERS.map(lambda c: c.encode()), st.integers(0, 255).map(lambda b: bytes([b]))), max_size=7))
@example(prompt=["😀"], ids=[b"\x80", b"a"])
@example(prompt=["a"], ids=["😀".encode(), b"\xf0\x9f", b" ", "好".encode()])
def test_any_tokens_of_bytes(layout, prompt, ids) -> None:
    """Shown is shown: bytes that are no character make their neighbours U+FFFD as far as those have not come yet."""
    tokenizer = BYTE_FALLBACK[layout]
    vocab = tokenizer.get_vocab()
    start = tokenizer("".join(prompt))["input_ids"]
    new = [i for unit in ids for i in ([vocab[unit.decode()]] if unit in (b"a", b"b", b".") else bytes_of(unit))]
    before, whole = (text_of_bytes(tokenizer, x) for x in (start, start + new))
    if layout == "llama":
        before, whole = before.removeprefix(" "), whole.removeprefix(" ")
    assert "".join(pieces(tokenizer, start, new)) == whole[len(before) :]
    if "\ufffd" not in whole:
        assert whole == tokenizer.decode(start + new)


@bytes_too
def test_bytes_that_go_on_for_long(layout) -> None:
    """They are not waited for for ever, nor is ever more of them decoded; and what follows is as it should be."""
    tokenizer, lengths = BYTE_FALLBACK[layout], []

    class Counting:
        def decode(self, ids, skip_special_tokens: bool) -> str:
            lengths.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    ids = tokenizer("a 😀")["input_ids"] + [0x80 + 1] * 200 + tokenizer("a b 好!")["input_ids"]
    found = pieces(Counting(), tokenizer("a 😀")["input_ids"], ids)
    assert "".join(found).endswith("😀" + "\ufffd" * 200 + (" " if layout == "llama" else "") + "a b 好!")
    assert max(lengths) <= 80


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


def test_stop_strings_before_min_tokens() -> None:
    texts = ["x.", "y.", "z."]
    assert stream(texts, (".",)) == (["x"], "", ".")
    assert stream(texts, (".",), may_stop_from=1) == (["x.", "y"], "", ".")
    # One that came too early does not count later, and one that is completed in time does.
    assert stream(["a.b", "c", "d"], (".b", "bcd"), may_stop_from=2) == (["a", ".", ""], "", "bcd")
    assert stream(["a.b", "c", "d"], (".b",), may_stop_from=1) == (["a.b", "c", "d"], "", None)
    assert stream(["a.b", "c", "d"], (".b", "xyz"), may_stop_from=1) == (["a", ".bc", "d"], "", None)
    assert stream(["ab", "cde"], ("bc",), include=True) == (["a", "bc"], "", "bc")


def test_stop_strings_at_random() -> None:
    """Against the plain definition: the text up to the first place where a stop string is complete, whatever the tokens are."""
    rng = random.Random(0)
    for _ in range(500):
        texts = ["".join(rng.choices("ab", k=rng.randint(0, 4))) for _ in range(rng.randint(1, 8))]
        stop = tuple({"".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(rng.randint(1, 2))})
        shown, rest, found = stream(texts, stop)
        whole = "".join(texts)
        ends = (whole[:end] for end in range(len(whole) + 1))
        before, first = next(((text, s) for text in ends for s in stop if text.endswith(s)), (whole, None))
        assert ("".join(shown) + rest, found) == (before.removesuffix(first or ""), first)


class OfBytes:
    """A token may hold a stop string and half a character."""

    tokens = (b"hello", b" STOP\xe2", b"\x82\xac", b" more")

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self.tokens[i] for i in ids).decode("utf8", errors="replace")


@pytest.mark.parametrize("may_stop", [False, True])
def test_a_stop_string_before_half_a_character(may_stop) -> None:
    """It is text only when no more tokens follow."""
    d = Detokenizer(OfBytes(), [0], False, ("STOP",))
    assert d.add([1]) == "" and d.stopped_by is None
    assert d.flush(may_stop) == d.text == (" " if may_stop else " STOP\ufffd")
    assert d.stopped_by == ("STOP" if may_stop else None)

"""Incremental detokenization, with stop strings.

Tokens cannot be decoded one by one: a character may span several tokens, and some tokenizers drop or add a space depending on
the previous token. So each new piece is the difference of two decodings that start at the same token, a little before the new
ones. A piece that ends within a character is held back, as is the beginning of a possible stop string: returned text is final.

The decodings start between two characters. With byte-fallback tokens (Llama 2, Mistral, Gemma) the decoder prints a whole run
of bytes as U+FFFD if any part of it is invalid, and so is the rest of a character that begins before the decoding.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # minimum tokens of context before the new ones
_LONGEST = 18  # maximum; below it, the last decoding is reused as the text before
_PATIENCE = 32  # tokens after which an incomplete character is returned: none has that many bytes
_BEGUN = 3  # maximum tokens of an unfinished character at the prompt's end: it has at most four bytes
_UNFINISHED = "\ufffd"  # what decoders print for an incomplete character


class Detokenizer:
    """Incremental text of one request, by a tokenizer's ``decode(ids, skip_special_tokens=...)``.

    ``text`` is the continuation so far, the concatenation of all returned pieces. ``stopped_by`` is the stop string that ended
    it, or None; ``error`` is the message of the tokenizer's exception, or None. Either ends the text. ``stop``: strings that
    end the text before them, or with ``include_stop`` after them. One that is a special token (``<|im_end|>``) ends it also
    where special tokens are left out of the text."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool,
                 stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stop, self._include_stop = stop, include_stop
        self._ids = list(prompt_token_ids[-(_CONTEXT + 2 * _BEGUN) :])
        self._begin, self._shown = 0, len(self._ids)
        self._boundaries: list[int] = []  # between two characters: candidates for _begin; empty: not found yet
        self._before: str | None = None  # text of the tokens from _begin to _shown, if known
        self._token_texts: dict[int, str | None] = {}
        skipped = {_left_out(tokenizer, text): text for text in stop} if skip_special_tokens else {}
        self._unseen = {token: text for token, text in skipped.items() if token is not None}
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self.text = ""
        self.stopped_by: str | None = None
        self.error: str | None = None

    def add(self, token_ids: Sequence[int], *, may_stop: bool = True) -> str:
        """Add tokens and return their text. ``may_stop``: whether a stop string that they complete counts."""
        end = next((i for i, token in enumerate(token_ids) if token in self._unseen), None) if may_stop else None
        piece = self._show(self._decode_new(token_ids if end is None else token_ids[:end]), may_stop, hold=True)
        if end is not None and self.stopped_by is None:
            piece += self.flush()
            self.stopped_by = self._unseen[token_ids[end]]
            if self._include_stop:
                piece, self.text = piece + self.stopped_by, self.text + self.stopped_by
        return piece

    def flush(self, may_stop: bool = False) -> str:
        """Return the text that was held back; no more tokens follow. ``may_stop``: as of ``add``, for a stop string before half
        a character, which is text only now."""
        return "" if self.stopped_by is not None else self._show(self._decode_new([], last=True), may_stop, hold=False)

    def token_text(self, token: int) -> str | None:
        """The text of one token by itself; None if the tokenizer cannot decode it."""
        if token not in self._token_texts:
            try:
                self._token_texts[token] = self._tokenizer.decode([token])
            except Exception:  # of a token that was likely, but is not part of the output
                self._token_texts[token] = None
        return self._token_texts[token]

    def _decode(self, begin: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[begin:end], skip_special_tokens=self._skip)

    def _decode_new(self, token_ids: Sequence[int], last: bool = False) -> str:
        if self.error is None:
            try:
                if not self._boundaries:
                    self._before = self._look_for_boundaries()
                self._ids += token_ids
                return self._difference(last)
            except Exception as error:  # fails this request, not the others of its batch
                self.error = f"the tokenizer could not decode the tokens: {type(error).__name__}: {error}"
        return ""

    def _look_for_boundaries(self) -> str:
        """Find the first token to decode and the end of the prompt's last whole character; returns the text from there."""
        end = len(self._ids)
        for boundary in range(end, max(end - _BEGUN, 0) - 1, -1):
            near = boundary - _CONTEXT
            for begin in (*range(near, near - _BEGUN - 1, -1), *range(near + 1, max(boundary, 1))):
                if begin < 0:
                    continue
                text = self._decode(begin, boundary)
                if text.startswith(_UNFINISHED) or text.endswith(_UNFINISHED):
                    continue
                self._begin, self._boundaries = begin, [boundary]
                whole = text if boundary == end else self._decode(begin)
                return whole if whole.startswith(text) else text + self._decode(boundary)  # an incomplete run of bytes
        self._begin, self._boundaries = max(end - _CONTEXT, 0), [end]  # invalid bytes
        return self._decode(self._begin)

    def _difference(self, last: bool) -> str:
        """The text of the tokens after ``_shown``, or "" while later tokens may change it. ``last``: there are none."""
        before = self._decode(self._begin, self._shown) if self._before is None else self._before
        now = self._decode(self._begin)
        may_wait = not last and len(self._ids) - self._shown <= _PATIENCE
        self._before = before
        if may_wait and now.endswith(_UNFINISHED):
            return ""
        same = _same(before, now)
        if same < len(before) and now.startswith(_UNFINISHED, same):
            # Invalid bytes turn the characters before them, already shown, into U+FFFD: decode without those.
            self._begin = self._boundaries[-1]
            self._before = before = self._decode(self._begin, self._shown)
            now = self._decode(self._begin)
            same = _same(before, now)
        completed = same < len(before) and not before[same:].strip(_UNFINISHED)  # a character that was shown incomplete
        added_from = same + 1 if completed else len(before)
        if may_wait and added_from > len(now):
            return ""
        self._before, self._shown = now, len(self._ids)
        self._boundaries.append(self._shown)  # not a boundary if patience ran out, but such bytes have none
        if len(self._ids) - self._begin > _LONGEST:
            begin = max((b for b in self._boundaries if b <= self._shown - _CONTEXT), default=self._begin)
            if begin > self._begin:
                self._begin, self._before = begin, None
                self._boundaries = [b for b in self._boundaries if b > begin]
        return now[added_from:]

    def _show(self, new: str, may_stop: bool, hold: bool) -> str:
        old, piece = len(self._held), self._held + new
        self._held = ""
        if may_stop:  # a match must end in the new text: earlier ones did not count
            found = [(at, s) for s in self._stop if (at := piece.find(s, max(0, old - len(s) + 1))) >= 0]
            if found:
                at, self.stopped_by = min(found, key=lambda f: f[0] + len(f[1]))  # the first to end, whatever the tokens are
                piece = piece[: at + len(self.stopped_by) * self._include_stop]
                self.text += piece
                return piece
        if hold and self._stop:
            keep = min(len(piece), max(map(len, self._stop)) - 1)
            while keep and not any(s.startswith(piece[len(piece) - keep :]) for s in self._stop):
                keep -= 1
            piece, self._held = piece[: len(piece) - keep], piece[len(piece) - keep :]
        self.text += piece
        return piece


def _left_out(tokenizer: Any, text: str) -> int | None:
    """The special token that is ``text``, which ``skip_special_tokens`` leaves out; None if it is no such token."""
    try:
        token = tokenizer.convert_tokens_to_ids(text)  # of an unknown one maybe the token for unknown ones, or an error
        known = tokenizer.decode([token], skip_special_tokens=False) == text
        return int(token) if known and not tokenizer.decode([token], skip_special_tokens=True) else None
    except Exception:  # of the tokenizer's code, for text that is no token of its
        return None


def _same(a: str, b: str) -> int:
    """Length of the common prefix."""
    return len(a) if b.startswith(a) else len(os.path.commonprefix([a, b]))

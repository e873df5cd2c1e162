"""Text of a token stream, piece by piece, and the stop strings in it.

Decoding tokens one by one is wrong twice: a character may span several tokens, and some tokenizers drop or add a space
depending on the token before. So each new piece is the difference of two decodings that start at the same token, a little
before the new ones, and a piece that ends in the middle of a character waits. So does the beginning of what may become a
stop string: what was shown is never taken back.

The decodings start between two characters. Where a vocabulary has a token for each byte ("byte fallback": Llama 2, Mistral,
Gemma), the decoder prints a whole run of such tokens as U+FFFD if any part of it is no character, and the rest of a character
that begins before the decoding is none.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens of context before the new ones, at least
_LONGEST = 18  # and at most: until then what was decoded last time serves as the text before
_PATIENCE = 32  # tokens after which an incomplete character is no longer waited for: none has so many bytes
_BEGUN = 3  # tokens of a character that the prompt leaves unfinished, at most: it has four bytes at most
_UNFINISHED = "\ufffd"  # what decoders print for an incomplete character


class Detokenizer:
    """Incremental text of one request.

    ``text`` is the continuation so far: all the pieces that were returned, end to end. ``stopped_by`` is the stop string that
    ended it, or None; no text comes after it. ``error``: what the tokenizer raised, in words, or None; then, too, none does.

    Args:
        tokenizer: has ``decode(ids, skip_special_tokens=...)``.
        prompt_token_ids: of the request.
        skip_special_tokens: leave special tokens out.
        stop: strings that end the text where they begin, or with ``include_stop`` where they end.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool,
                 stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stop, self._include_stop = stop, include_stop
        self._ids = list(prompt_token_ids[-(_CONTEXT + 2 * _BEGUN) :])
        self._begin, self._shown = 0, len(self._ids)
        self._boundaries: list[int] = []  # places between two characters, where _begin may go; none: not looked for yet
        self._before: str | None = None  # the text of the tokens from _begin to _shown, if it is known
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self.text = ""
        self.stopped_by: str | None = None
        self.error: str | None = None

    def add(self, token_ids: Sequence[int], *, may_stop: bool = True) -> str:
        """Take in new tokens; the text they add (possibly none yet). ``may_stop``: a stop string that they complete counts."""
        return self._show(self._decode_new(token_ids), may_stop, hold=True)

    def flush(self) -> str:
        """Nothing follows: the text that waited."""
        return "" if self.stopped_by is not None else self._show(self._decode_new([], last=True), False, hold=False)

    def _decode(self, begin: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[begin:end], skip_special_tokens=self._skip)

    def _decode_new(self, token_ids: Sequence[int], last: bool = False) -> str:
        if self.error is None:
            try:
                if not self._boundaries:
                    self._before = self._look_for_boundaries()
                self._ids += token_ids
                return self._difference(last)
            except Exception as error:  # one request's trouble, not that of the others in its batch
                self.error = f"the tokenizer could not decode the tokens: {type(error).__name__}: {error}"
        return ""

    def _look_for_boundaries(self) -> str:
        """Find where to begin in the prompt, and where its last whole character ends; the text of the prompt from there."""
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
                return whole if whole.startswith(text) else text + self._decode(boundary)  # the run of bytes is incomplete
        self._begin, self._boundaries = max(end - _CONTEXT, 0), [end]  # these bytes are no characters
        return self._decode(self._begin)

    def _difference(self, last: bool) -> str:
        """What the tokens after ``_shown`` add to the text; nothing as long as that may change. ``last``: it will not."""
        before = self._decode(self._begin, self._shown) if self._before is None else self._before
        now = self._decode(self._begin)
        may_wait = not last and len(self._ids) - self._shown <= _PATIENCE
        self._before = before
        if may_wait and now.endswith(_UNFINISHED):
            return ""
        same = _same(before, now)
        if same < len(before) and now.startswith(_UNFINISHED, same):
            # Bytes that are no character have undone the characters before them, which were shown: leave those out.
            self._begin = self._boundaries[-1]
            self._before = before = self._decode(self._begin, self._shown)
            now = self._decode(self._begin)
            same = _same(before, now)
        completed = same < len(before) and not before[same:].strip(_UNFINISHED)  # a character that was shown unfinished
        added_from = same + 1 if completed else len(before)
        if may_wait and added_from > len(now):
            return ""
        self._before, self._shown = now, len(self._ids)
        self._boundaries.append(self._shown)  # it is none if patience ran out, but no place is one in such bytes
        if len(self._ids) - self._begin > _LONGEST:
            begin = max((b for b in self._boundaries if b <= self._shown - _CONTEXT), default=self._begin)
            if begin > self._begin:
                self._begin, self._before = begin, None
                self._boundaries = [b for b in self._boundaries if b > begin]
        return now[added_from:]

    def _show(self, new: str, may_stop: bool, hold: bool) -> str:
        old, piece = len(self._held), self._held + new
        self._held = ""
        if may_stop:  # a match must end in the new text: an old one did not count when it came
            found = [(at, s) for s in self._stop if (at := piece.find(s, max(0, old - len(s) + 1))) >= 0]
            if found:
                at, self.stopped_by = min(found, key=lambda f: f[0])
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


def _same(a: str, b: str) -> int:
    """How many characters the two begin with in common."""
    return len(a) if b.startswith(a) else len(os.path.commonprefix([a, b]))


__all__ = ["Detokenizer"]

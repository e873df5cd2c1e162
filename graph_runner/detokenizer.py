"""Text of a token stream, piece by piece, and the stop strings in it.

Decoding tokens one by one is wrong twice: a character may span several tokens, and some tokenizers drop or add a space
depending on the token before. So each new piece is the difference of two decodings that start at the same token, a little
before the new ones, and a piece that ends in the middle of a character waits. So does the beginning of what may become a
stop string: what was shown is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens of context before the new ones, at least
_LONGEST = 18  # and at most: until then what was decoded last time serves as the text before
_PATIENCE = 32  # tokens after which an incomplete character is no longer waited for: none has so many bytes
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
        self._ids = list(prompt_token_ids[-_CONTEXT:])
        self._begin, self._shown = 0, len(self._ids)
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

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _decode_new(self, token_ids: Sequence[int], last: bool = False) -> str:
        self._ids += token_ids
        if self.error is not None:
            return ""
        try:
            if self._before is None:
                self._before = self._decode(self._ids[self._begin : self._shown])
            now = self._decode(self._ids[self._begin :])
        except Exception as error:  # one request's trouble, not that of the others in its batch
            self.error = f"the tokenizer could not decode the tokens: {type(error).__name__}: {error}"
            return ""
        before = self._before
        waits = now.endswith(_UNFINISHED) or len(now) < len(before)
        if waits and not last and len(self._ids) - self._shown <= _PATIENCE:
            return ""
        self._before = now
        if len(self._ids) - self._begin > _LONGEST:
            self._begin, self._before = max(self._begin, self._shown - _CONTEXT), None
        self._shown = len(self._ids)
        return now[len(before) :]

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


__all__ = ["Detokenizer"]

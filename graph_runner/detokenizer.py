"""Text of a token stream, piece by piece.

Decoding tokens one by one is wrong twice: a character may span several tokens, and some tokenizers drop or add a space
depending on the token before. So each new piece is the difference of two decodings that start at the same token, a little
before the new ones, and a piece that ends in the middle of a character waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens of context before the new ones
_UNFINISHED = "\ufffd"  # what decoders print for an incomplete character


class Detokenizer:
    """Incremental text of one request. ``text`` is the continuation so far."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt_token_ids[-_CONTEXT:])
        self._begin, self._shown = 0, len(self._ids)
        self.text = ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Take in new tokens; the text they add (possibly none yet). ``last``: nothing follows, show what there is."""
        self._ids += token_ids
        before = self._decode(self._ids[self._begin : self._shown])
        now = self._decode(self._ids[self._begin :])
        if (now.endswith(_UNFINISHED) and not last) or len(now) <= len(before):
            return ""
        piece = now[len(before) :]
        self._begin = max(self._begin, self._shown - _CONTEXT)
        self._shown = len(self._ids)
        self.text += piece
        return piece


__all__ = ["Detokenizer"]

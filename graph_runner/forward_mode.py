"""The kind of step that a batch is, and the hidden states to return. Names and groups are SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto


def _among(*names: str) -> Callable[[IntEnum], bool]:
    """A method: whether the mode is one of these."""
    return lambda mode: mode.name in names


class ForwardMode(IntEnum):
    """EXTEND: prompts, perhaps over a cached beginning. MIXED: prompts and decodes. IDLE: no tokens, on a rank that takes part
    in others' collectives. TARGET_VERIFY, DRAFT_EXTEND: of speculative decoding. SPLIT_PREFILL: some layers of a prefill.
    DUMMY_FIRST: a batch without results that starts an overlapped pipeline."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    SPLIT_PREFILL = auto()
    DUMMY_FIRST = auto()

    @classmethod
    def of(cls, num_decode_rows: int, num_reqs: int) -> ForwardMode:
        """The mode of a batch of the engine."""
        if num_reqs == 0:
            return cls.IDLE
        return cls.DECODE if num_decode_rows == num_reqs else cls.EXTEND if num_decode_rows == 0 else cls.MIXED

    is_extend = _among("EXTEND", "MIXED", "DRAFT_EXTEND", "TARGET_VERIFY")  # rows may have several tokens
    is_prefill = is_extend
    is_extend_or_draft_extend_or_mixed = _among("EXTEND", "DRAFT_EXTEND", "MIXED")
    is_decode = is_cpu_graph = _among("DECODE")
    is_mixed = _among("MIXED")
    is_idle = _among("IDLE")
    is_decode_or_idle = _among("DECODE", "IDLE")
    is_target_verify = _among("TARGET_VERIFY")
    is_draft_extend = _among("DRAFT_EXTEND")
    is_split_prefill = _among("SPLIT_PREFILL")
    is_dummy_first = _among("DUMMY_FIRST")
    #: All rows have equally many tokens, so that a decode graph can run it.
    is_cuda_graph = _among("DECODE", "TARGET_VERIFY", "IDLE")


class CaptureHiddenMode(IntEnum):
    """Hidden states to return, ordered: what has FULL serves LAST too."""

    NULL = 0
    LAST = 1
    FULL = 2

    need_capture = _among("LAST", "FULL")
    is_last = _among("LAST")
    is_full = _among("FULL")

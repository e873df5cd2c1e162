"""The kind of step that a batch is, and the hidden states to return. Names and groups are SGLang's."""

from __future__ import annotations

from enum import IntEnum, auto


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

    def is_extend(self) -> bool:
        """Rows may have several tokens."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND, ForwardMode.TARGET_VERIFY)

    is_prefill = is_extend

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND, ForwardMode.MIXED)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_dummy_first(self) -> bool:
        return self is ForwardMode.DUMMY_FIRST

    def is_cuda_graph(self) -> bool:
        """All rows have equally many tokens, so that a decode graph can run it."""
        return self in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE)

    def is_cpu_graph(self) -> bool:
        return self is ForwardMode.DECODE


class CaptureHiddenMode(IntEnum):
    """Hidden states to return, ordered: what has FULL serves LAST too."""

    NULL = 0
    LAST = 1
    FULL = 2

    def need_capture(self) -> bool:
        return self is not CaptureHiddenMode.NULL

    def is_last(self) -> bool:
        return self is CaptureHiddenMode.LAST

    def is_full(self) -> bool:
        return self is CaptureHiddenMode.FULL


__all__ = ["CaptureHiddenMode", "ForwardMode"]

"""Prompts whose tokens attend to each other by the op's own k and v, and to the cached tokens before them by pages.

The first pass is causal, the second is not: every query sees all of its sequence's prefix, so no window goes this way. Both are
merged by their log-sum-exp, to base 2 as FlashInfer's kernels give it. Sequences without a prefix have no keys in the second
pass, and the merge leaves what the first one gave.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.attn_ops.ops.merge_state import merge_state_triton


class OwnKeys:
    """A plan that is run as one for pages is, but for ``own``. ``runs``: (FlashInfer's BatchPrefillWithRaggedKVCacheWrapper,
    planned, first token, token after the last), of all tokens; ``prefix``: its paged wrapper, planned for the prefixes; None:
    no sequence has one."""

    def __init__(self, runs: list[tuple[Any, int, int]], prefix: Any) -> None:
        self.runs, self.prefix = runs, prefix

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], *, own: tuple[torch.Tensor, torch.Tensor],
            out: torch.Tensor, lse: torch.Tensor | None = None, return_lse: bool = False) -> None:
        """Writes ``out`` (T, H, D), and ``lse`` (T, H) with ``return_lse``. ``own``: k and v (T, Hkv, D) of the tokens."""
        near, near_lse = out, lse if return_lse else None
        if self.prefix is not None:
            near, near_lse = torch.empty_like(out), out.new_empty(out.shape[:2], dtype=torch.float32)
        for wrapper, begin, end in self.runs:
            wrapper.run(q[begin:end], *(x[begin:end] for x in own), out=near[begin:end], return_lse=near_lse is not None,
                        lse=None if near_lse is None else near_lse[begin:end])
        if self.prefix is None or near_lse is None:
            return
        far, far_lse = torch.empty_like(near), torch.empty_like(near_lse)
        self.prefix.run(q, pages, out=far, lse=far_lse, return_lse=True)
        _, total = merge_state_triton(near, near_lse, far, far_lse, merged=out, binary=True)
        if return_lse and lse is not None:
            lse.copy_(total)

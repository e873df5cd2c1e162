"""The verdict of the trial in float32 (``packing_check.py``), kept beside the trace: a later start of the same model runs its
own forward twice instead of three times, and its graph not at all.

What that trial finds follows from four things: its code, the graph, the tokens, and what the model's own forward computes. Of
the code, and of the file with the graph, a digest is noted. The forward is asked: its logits for all tokens of the trial, as
one sequence in float32, and for the first one alone, must have the bits that they had then. So other weights (but of experts
that these tokens do not meet), or other code that no guard of the trace saw, mean another trial. A model with code of the
user's, which may do something else with a cache, say, has a trial at each start, as has one whose sums are in another order
each time.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.graph_runner.own_cache import has_users_code
from quire.passes.capture.evaluating import ChangedWhileTraced
from quire.passes.capture.in_float32 import InFloat32, exact_products
from quire.passes.capture.kept_verdicts import KeptVerdicts
from quire.passes.capture.paged_model import PagedModel

logger = logging.getLogger(__name__)
#: The code of trials, of which the name of the trace's file says nothing.
_CODE = ("packing_check.py", "own_cache.py", "kept_trial.py")


@dataclass(frozen=True)
class KeptTrial:
    """A trial, by the digest of all that it follows from, and those that a model has passed."""

    digest: str
    verdicts: KeptVerdicts

    @classmethod
    def of(cls, paged: PagedModel, ids: torch.Tensor, half: torch.dtype, *more: Any) -> KeptTrial | None:
        """None: its verdict is not kept. ``ids`` (T,): all tokens of the trial. ``half``: the model's dtype. ``more``: what it
        depends on beside, as it prints."""
        file = paged.graph.trace_file
        if file is None or has_users_code(paged.model):
            return None
        mode = InFloat32(half)
        try:
            with exact_products(), mode:
                places = torch.arange(len(ids), device=ids.device)
                logits = [paged.by_itself(ids[:n], places[:n]).float() for n in (len(ids), 1)]
            if mode.kept:  # in half precision, a last bit says little
                return None
            found = hashlib.blake2b(repr((paged.options, ids.tolist(), str(half), *more)).encode(), digest_size=16)
            for source in (file, *(Path(__file__).with_name(name) for name in _CODE)):
                found.update(source.read_bytes())
            for each in logits:
                found.update(each.cpu().contiguous().numpy().data)
        except ChangedWhileTraced:
            raise
        except Exception as error:
            logger.info("packing check: its verdict is not kept: %s: %s", type(error).__name__, error)
            return None
        return cls(found.hexdigest(), KeptVerdicts(file, "trials"))

    def passed(self) -> bool:
        """Whether this trial was passed before."""
        return self.verdicts.has(self.digest)

    def keep(self) -> None:
        """Note that it is passed."""
        self.verdicts.add(self.digest)

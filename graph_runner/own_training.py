"""Whether a model's own forward gives in training mode what it gives in evaluation mode, in which an engine runs it.

``own_forward.training_difference`` reads code for that. A helper, a literal rate beside one that is 0, or a function in a table
may ask for the mode where reading does not find it. So where code of the user's is in a model in training mode, ``generate``
asks by running too: a few tokens of the call, with a cache as transformers runs them, in both modes. The same kernels run on
the same numbers, so that results are equal to the last bit, unless some operation adds up in any order.

The run in training mode must leave nothing behind. Random numbers are a difference, however rarely they change a result, and
generators get their states back. A write to a tensor of the model is a difference, and is not done. What modules' attributes
get is a difference too, and they get back what they held.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.graph_runner.own_cache import evaluated, has_users_code, logits_with_cache, may_be_users
from quire.graph_runner.own_forward import asks_for_mode, training_difference
from quire.passes.capture.evaluating import ChangedWhileTraced, evaluating
from quire.passes.capture.followed import functions_of
from quire.passes.capture.in_float32 import written

_TOKENS = 8  # of the call's first row
_NOISE = 3  # times as much as one mode differs from itself is order of summation


class _Acts(RuntimeError):
    """The forward does what it must not do in a trial."""


@torch.no_grad()
def differs_in_training(model: torch.nn.Module, ids: torch.Tensor, read: Mapping[str, Any]) -> str | None:
    """Why the model in training mode differs from evaluation mode on ids (B, L), by running it; None: it does not, or it has no
    code of the user's, or no module is in training mode. ``read``: of ``Reads.values``: the functions that its code calls.
    Modes are changed meanwhile."""
    if not any(module.training for module in model.modules()):
        return None
    functions = [found for held in read.values() for found in functions_of(held)]
    for function, owner in functions:
        if (where := asks_for_mode(function, owner, model)) is not None:
            return f"{where} asks whether it is in training mode"
    if not functions and not has_users_code(model, may_be_users):
        return None
    if (read_so := training_difference(model)) is not None:  # again: another thread's trial may have set modes before
        return read_so
    row = ids[0, -_TOKENS:]
    steps = min(1, len(row) - 1)
    try:
        wanted, rows = evaluated(model, row, steps)
        found = _watched(model, row, steps, rows)
        if isinstance(found, str):
            return found
        if _equal(found, wanted, 0.0):
            return None
        with evaluating(model):
            again = logits_with_cache(model, row, steps, rows)
    except ChangedWhileTraced as error:
        return str(error)
    except Exception as error:
        return f"its own forward does not run on a few tokens: {type(error).__name__}: {error}"
    if _equal(found, wanted, _NOISE * max(_gap(a, b) for a, b in zip(again, wanted, strict=True))):
        return None
    return "its own forward has other logits then, on a few tokens"


def _equal(found: list[torch.Tensor], wanted: list[torch.Tensor], limit: float) -> bool:
    """Whether logits differ by ``limit`` at most. In training mode with checkpointing there is no cache, and one call."""
    return len(found) <= len(wanted) and all(_gap(a, b) <= limit for a, b in zip(found, wanted, strict=False))


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where one is NaN or infinite alone, and the other is not so."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a.double() - b.double()).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf")).max().item()


def _watched(model: torch.nn.Module, row: torch.Tensor, steps: int, rows: int) -> list[torch.Tensor] | str:
    """Logits in the modes that modules have; or what the forward does beside computing them."""
    watch, found = _Watch(model), list[torch.Tensor]()
    held = [(module, own) for module in model.modules() for own in (vars(module), module._buffers)]
    before = [dict(own) for _, own in held]  # after a run in evaluation mode, which may have filled caches
    with _generators_kept(row.device) as drawn:
        try:
            with watch:
                found = logits_with_cache(model, row, steps, rows)
        except _Acts:
            pass
        draws = drawn()
    changed = [(module, own, was) for (module, own), was in zip(held, before, strict=True)
               if own.keys() != was.keys() or not all(_same(own[name], was[name]) for name in was)]
    for _, own, was in changed:
        for name in own.keys() - was.keys():
            del own[name]
        own.update(was)
    if changed:
        return f"its own forward sets attributes of a {type(changed[0][0]).__name__} then, or always"
    return watch.seen or ("its own forward draws random numbers then" if draws else found)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(a, b)
    return a is b or type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Give PyTorch's, Python's and NumPy's generators their states back. Yields what says whether one was used."""
    cuda = device.type == "cuda"

    def states() -> tuple[Any, ...]:
        on_device = torch.cuda.get_rng_state(device).tolist() if cuda else []
        return torch.get_rng_state().tolist(), on_device, random.getstate(), pickle.dumps(np.random.get_state())

    numbers, numpys, before = random.getstate(), np.random.get_state(), states()
    with torch.random.fork_rng([device] if cuda else []):
        try:
            yield lambda: states() != before
        finally:
            random.setstate(numbers)
            np.random.set_state(numpys)


class _Watch(TorchDispatchMode):
    """Stops a forward before it writes to a tensor of the model, or draws by a generator of its own. ``seen`` says which."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        held = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values(), *vars(m).values()))
        self.own, self.seen = {place for t in held if isinstance(t, torch.Tensor) and (place := _place(t))}, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            self.seen = "its own forward draws random numbers then"
        elif any(isinstance(t, torch.Tensor) and _place(t) in self.own for t in _written_by(func, args, kwargs)):
            self.seen = "its own forward writes to a tensor of the model then"
        if self.seen:
            raise _Acts(self.seen)
        return func(*args, **kwargs)


def _written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """What an operation writes; the statistics of a batch norm in training mode too, of which schemas do not tell."""
    yield from written(func, args, kwargs)
    given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
    if "running_mean" in given and given.get("training", given.get("use_input_stats", True)):
        yield from (given["running_mean"], given.get("running_var"))


def _place(tensor: torch.Tensor) -> int | None:
    """Where the memory of a tensor is; None: it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None

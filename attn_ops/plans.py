"""The plans that a backend's state holds at once: those of the steps of one CUDA graph, by ``Step.number``.

Planning number 0 begins a new set: no step of the set before has a plan then. What a number's plan keeps from set to set
(buffers that graphs read, pinned memory) is the number's own, so that no plan changes what another one has copied or reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from quire.attn_ops.step import Step, current_step


@dataclass(eq=False)
class StepPlan:
    """The plan of one step. ``copied``: a CUDA event after the last copy from this plan's pinned memory, which is not rewritten
    before; None where nothing is copied. ``step``: whose plan it is, None while there is no whole one."""

    number: int
    copied: Any = None
    step: weakref.ref[Step] | None = field(default=None, init=False)

    def wait(self) -> None:
        """Until the copies are done."""
        if self.copied is not None:
            self.copied.synchronize()


P = TypeVar("P", bound=StepPlan)


class StepPlans(Generic[P]):
    """``make``: a number -> what a plan of that number holds, made at its first step, and of number 0 at once. It must not
    refer to the state: in a circle of references that would keep its memory until Python looks for such."""

    def __init__(self, make: Callable[[int], P]) -> None:
        self.make = make
        self.held: dict[int, P] = {0: make(0)}

    def begin(self, step: Step) -> P:
        """What the plan of ``step`` is written to. It counts once ``step`` is set there."""
        if step.number not in self.held:
            self.held[step.number] = self.make(step.number)
        for number, plan in self.held.items():
            if step.number in (0, number):
                plan.step = None
        return self.held[step.number]

    def of(self, step: Step) -> P | None:
        """The plan of ``step``, or None if it has none, or one of another step has taken its place."""
        plan = self.held.get(step.number)
        return None if plan is None or plan.step is None or plan.step() is not step else plan

    def missing(self, step: Step) -> str:
        """Why there is none, for errors."""
        planned = [number for number, plan in self.held.items() if plan.step is not None]
        return (f" (this is step number {step.number} of a CUDA graph, and planned are "
                f"{', '.join(map(str, planned)) or 'none'}; number 0 begins anew)" if step.number or any(planned) else "")


def planned_step(name: str, who: str) -> tuple[Step, Any, Any]:
    """The step in progress, the state of the backend ``name`` in it, and its plan there. Raises RuntimeError, which says that
    ``who`` needs one, if the step was not planned."""
    step = current_step()
    state = None if step is None else step.states.get(name)
    plan = None if step is None or state is None else state.plans.of(step)
    if step is None or state is None or plan is None:
        raise RuntimeError(f"{who} needs a paged step that was planned: run the model inside `with quire.step(cache, "
                           "metadata)`, or call plan(metadata, step) first"
                           + ("" if step is None or state is None else state.plans.missing(step)))
    return step, state, plan

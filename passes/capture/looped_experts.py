"""Experts that transformers writes as a Python loop over those in use, computed by ``quire::expert_swiglu``.

The loop reads on the host which experts are in use, so it cannot be one graph. LongCat-Flash has one that does not go through
transformers' experts interface: SwiGLU experts, and past them *zero experts*, which return the token as it is. While a model is
traced or runs a paged step, the class has our forward.

A class is left as it is, and the model refused for the loop, unless both forwards give the same numbers for a few tokens that
are routed to the first and the last expert of each kind.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from quire.attn_ops.ops.experts import expert_swiglu

_CLASSES = (("transformers.models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"),)
_LOCK = threading.RLock()
_ACTIVE: dict[type, tuple[int, Any]] = {}  # by class: how many contexts, and its own forward
_SAME: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def experts_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
                    ) -> torch.Tensor:
    """(T, H) rows, (T, k) expert ids and weights -> (T, H)."""
    routed = self.num_routed_experts
    gate_up, down = self.gate_up_proj[:routed], self.down_proj  # the zero experts' rows of gate_up_proj are not used
    rows = hidden_states.to(down.dtype)
    out = expert_swiglu(rows, gate_up, down, top_k_index, False).float().unflatten(0, top_k_index.shape)
    out = torch.where((top_k_index >= routed)[..., None], hidden_states.float()[:, None], out)
    return (out * top_k_weights.float()[..., None]).sum(1).to(hidden_states.dtype)


def _same(module: Any, own: Any) -> bool:
    """Whether ``experts_forward`` computes what the class's ``own`` forward does."""
    try:
        weight, routed, total = module.gate_up_proj, module.num_routed_experts, module.total_experts
        if type(weight) is not torch.nn.Parameter or type(module.down_proj) is not torch.nn.Parameter or not routed:
            return False
        ids = torch.tensor(sorted({0, routed - 1, min(routed, total - 1), total - 1}), device=weight.device)
        generator = torch.Generator(weight.device).manual_seed(0)
        rows = torch.randn(len(ids), weight.shape[2], generator=generator, device=weight.device).to(weight.dtype)
        chosen = torch.stack([ids, ids.roll(1)], 1)
        weights = torch.rand(chosen.shape, generator=generator, device=weight.device)
        with torch.no_grad():
            found, wanted = experts_forward(module, rows, chosen, weights), own(module, rows, chosen, weights)
        size = wanted.float().abs().max().clamp_min(1e-30)
        return bool((found.float() - wanted.float()).abs().max() <= 8 * torch.finfo(weight.dtype).eps * size)
    except Exception:
        return False


def _known(model: torch.nn.Module) -> set[type]:
    """The classes all of whose modules in ``model`` can be computed by ``experts_forward``."""
    kinds = {getattr(sys.modules[path], name, None) for path, name in _CLASSES if path in sys.modules}
    modules = [m for m in model.modules() if type(m) in kinds] if kinds else []  # most processes have no such class
    good, bad = set[type](), set[type]()
    for module in modules:
        kind: Any = type(module)
        own = _ACTIVE[kind][1] if kind in _ACTIVE else kind.forward
        if module not in _SAME:
            _SAME[module] = _same(module, own)
        (good if _SAME[module] and "forward" not in module.__dict__ else bad).add(kind)
    return good - bad


@contextlib.contextmanager
def looped_experts_active(model: torch.nn.Module) -> Iterator[None]:
    """While inside, such experts of ``model`` run by quire's op; afterwards the classes have their own forward."""
    kinds: Any = _known(model)
    with _LOCK:
        for kind in kinds:
            count, own = _ACTIVE.get(kind, (0, kind.forward))
            _ACTIVE[kind] = count + 1, own
            kind.forward = experts_forward
    try:
        yield
    finally:
        with _LOCK:
            for kind in kinds:
                count, own = _ACTIVE.pop(kind)
                if count > 1:
                    _ACTIVE[kind] = count - 1, own
                else:
                    kind.forward = own


__all__ = ["experts_forward", "looped_experts_active"]

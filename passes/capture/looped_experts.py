"""Experts that transformers writes as a Python loop over those in use, computed by ``quire::expert_swiglu``.

The loop reads on the host which experts are in use, so it cannot be one graph. LongCat-Flash has one outside transformers'
experts interface: SwiGLU experts, and past them *zero experts*, which return the token as it is. While a model is traced or
runs a paged step, the class has our forward; it is left as it is, and the model refused, unless its forward has the source that
was read here, to the letter, and plain parameters, SiLU, an identity, and no hooks on the two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

from quire.attn_ops.ops.experts import expert_swiglu

_MODULE, _CLASS = "transformers.models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"
#: SHA-256 of the source of forwards that ``experts_forward`` computes: of transformers 5.17 to 5.23.
_SOURCES = frozenset(("d59d2a7326e9fadd766992c19cab2f4d9d94ba6c47df9f494a47faa2f383d0be",))
_LOCK = threading.RLock()
_ACTIVE: dict[type, tuple[int, Any]] = {}  # by class: how many contexts, and its own forward


def experts_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
                    ) -> torch.Tensor:
    """(T, H) rows, (T, k) expert ids and weights -> (T, H)."""
    routed = self.num_routed_experts
    gate_up, down = self.gate_up_proj[:routed], self.down_proj  # the zero experts' rows of gate_up_proj are not used
    rows = hidden_states.to(down.dtype)
    out = expert_swiglu(rows, gate_up, down, top_k_index, False).float().unflatten(0, top_k_index.shape)
    out = torch.where((top_k_index >= routed)[..., None], hidden_states.float()[:, None], out)
    return (out * top_k_weights.float()[..., None]).sum(1).to(hidden_states.dtype)


@functools.cache
def _is_read(code: CodeType) -> bool:
    """Whether this is the code of a forward that ``experts_forward`` stands for."""
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest() in _SOURCES
    except OSError:  # made without a file
        return False


def is_plain(part: Any, *kinds: type[torch.nn.Module]) -> bool:
    """Whether a module is of one of these kinds, and does what they do."""
    return type(part) in kinds and "forward" not in vars(part) and not part._forward_hooks and not part._forward_pre_hooks


def _same(module: Any, own: Any) -> bool:
    """Whether ``experts_forward`` computes what the class's ``own`` forward does on this module."""
    from transformers.activations import SiLUActivation

    weights = (module.gate_up_proj, module.down_proj)
    return (isinstance(code := getattr(own, "__code__", None), CodeType) and _is_read(code)
            and all(type(w) is torch.nn.Parameter for w in weights) and "forward" not in vars(module)
            and is_plain(module.act_fn, torch.nn.SiLU, SiLUActivation)
            and is_plain(module.identity_expert, torch.nn.Identity))


def _known(model: torch.nn.Module) -> list[Any]:
    """The class, if ``model`` has modules of it, and ``experts_forward`` can compute all of them."""
    kind: Any = getattr(sys.modules.get(_MODULE), _CLASS, None)
    modules = [m for m in model.modules() if type(m) is kind] if kind else []  # most processes have no such class
    own = _ACTIVE[kind][1] if kind in _ACTIVE else getattr(kind, "forward", None)
    return [kind] if modules and all(_same(m, own) for m in modules) else []


@contextlib.contextmanager
def looped_experts_active(model: torch.nn.Module) -> Iterator[None]:
    """While inside, such experts of ``model`` run by quire's op; afterwards the classes have their own forward."""
    kinds = _known(model)
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

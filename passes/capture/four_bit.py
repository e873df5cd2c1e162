"""Linear layers of bitsandbytes in 4 bits (NF4, FP4): what their forward does at its first call, and in training mode.

The first call restores a lost ``quant_state``, chooses the dtype to compute in and casts the bias. On a CPU with AVX512-BF16,
out of training mode, it also packs the weight: it is written anew in an order for a kernel in bfloat16, with scales in
bfloat16. Training mode goes on with the weight as it lies, and so do steps: a model whose weights are packed computes in
bfloat16, in both modes, and one whose weights are not computes as it is trained.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.attn_ops.backend import UnsupportedAttention

_PACKS = frozenset(("x.device.type == 'cpu'", "self.support_avx512bf16_for_cpu", "not self.training"))


def layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The layers in 4 bits, with their names."""
    return [(name, m) for name, m in model.named_modules() if _is_layer(m)]


def _is_layer(module: torch.nn.Module) -> bool:
    return any(cls.__name__ == "Linear4bit" and cls.__module__.startswith("bitsandbytes.") for cls in type(module).__mro__)


def is_packed(layer: Any) -> bool:
    state = getattr(layer.weight, "quant_state", None)
    return bool(getattr(layer if state is None else state, "packing_format_for_cpu", False))


def may_pack(layer: Any) -> bool:
    """Whether the layer's own forward would pack its weight, once it is not in training mode."""
    return layer.weight.device.type == "cpu" and bool(getattr(layer, "support_avx512bf16_for_cpu", False)) \
        and not is_packed(layer)


def keeps_mode(module: torch.nn.Module) -> bool:
    """Whether a module must be traced in the mode in which it is, for in the other one it would change its weight."""
    return _is_layer(module) and may_pack(module)


@functools.lru_cache(maxsize=64)
def only_packs(method: types.FunctionType) -> bool:
    """Whether a method reads ``self.training`` for nothing but whether to pack: in the condition of an ``if`` that holds on
    such CPUs alone, and whose one statement packs. Read from its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError, TypeError):
        return False
    known = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.test, ast.BoolOp) and isinstance(
                node.test.op, ast.And) and _PACKS <= {ast.unparse(part) for part in node.test.values} and len(
                node.body) == 1 and isinstance(made := getattr(node.body[0], "value", None), ast.Call) and ast.unparse(
                made.func) == "_convert_weight_packed_for_cpu":
            known |= {id(read) for read in ast.walk(node.test)}
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "training"]
    return bool(reads) and all(id(node) in known for node in reads)


def check_version(model: torch.nn.Module) -> None:
    """Refuse layers that are packed, or will be by their first call, where this version of bitsandbytes declares its kernel for
    them as one for a single row. Raises UnsupportedAttention, which says what to install."""
    packed = [name for name, layer in layers(model) if is_packed(layer) or (may_pack(layer) and not layer.training)]
    if packed and not _takes_rows():
        version = getattr(sys.modules["bitsandbytes"], "__version__", "of an unknown version")
        raise UnsupportedAttention(
            f"{packed[0]} is a layer in 4 bits, whose weight bitsandbytes packs for CPUs with AVX512-BF16; its kernel for that "
            f"is declared for one token at a time in bitsandbytes {version}, so a batch cannot be traced. Install "
            "bitsandbytes>=0.50, or leave the model in training mode, in which no weight is packed")


@functools.cache
def _takes_rows() -> bool:
    with FakeTensorMode():
        try:
            x, scales, table = (torch.empty(size, dtype=torch.float32) for size in ((2, 64), (1, 32), (16,)))
            torch.ops.bitsandbytes.gemv_4bit.default(x, torch.empty(32, 32, dtype=torch.uint8), [32, 64], scales, table, 64)
        except RuntimeError:
            return False
    return True


class Packing:
    """Whether the weights of a model's layers in 4 bits are packed; a trace is for one state of them. Compared before each
    step, as the other order of the same codes would be read as other weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen = [(name, layer, is_packed(layer)) for name, layer in layers(model)
                      if is_packed(layer) or may_pack(layer)]

    def change(self) -> str | None:
        """Describes a layer that was packed or unpacked (by ``state_dict``), or that its own forward would pack, or None."""
        for name, layer, packed in self._seen:
            if is_packed(layer) != packed:
                return f"{name}.weight.quant_state.packing_format_for_cpu: {packed} -> {not packed}"
            if not layer.training and may_pack(layer):
                return f"{name}.training: True -> False, in which bitsandbytes packs its weight"
        return None

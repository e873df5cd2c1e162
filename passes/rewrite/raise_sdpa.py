"""Route 2, the raising pass: F.scaled_dot_product_attention nodes become the semantic op, where that is provably the same.

Before::

    k_rep = reshape(expand(k[:, :, None]), ...)             # GQA repeat, in whatever spelling
    mask  = arange(S) ... <= ... & ...                      # built by the model
    out   = scaled_dot_product_attention(q, k_rep, v_rep, attn_mask=mask, scale=s)

After::

    out   = quire.attention(q, k, v, None, layer=i, scale=s, window=w or None, chunk=c or None, causal=True, ...)

Nothing is matched by its spelling. The repeat is recognised by *executing* the chain from k to k_rep on random numbers and
comparing with ``repeat_interleave``; the mask by executing its sub-graph on the positions of one sequence and comparing with
causal, window and chunk masks.

NOTE [Mask probe]: a probe shorter than the window would read a window as plain causal, a silent long-context bug. So the
sub-graph of a mask may do with positions only what bounds how far it can reach: add and subtract, divide by whole numbers
(rounding down), compare, and combine the results (``_ALLOWED``). Then its reach is at most the sum of its numbers, times the
divisors on one path, and the probe is longer than that. Where that would be too long, large numbers are replaced by small
ones, twice and by different ones: the answer must be one of them plus the same small offset (``<= w`` is a window of w + 1)
both times, and is translated back. What hidden scores are filled with is no such number. A buffer that takes part (a
stored triangle) is probed over its whole length. A probe with other token ids must agree too: a mask of the padding is none
of the positions.

Refused, with the reason in ``refusals``: dropout, a float bias (ALiBi, relative positions), a mask that depends on
something other than positions, a mask of no known kind, keys longer than queries (a KV cache in the graph), heads that are
neither equal nor a proven repeat.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quire.attn_ops.attention import attention, visible
from quire.passes.fx import (
    ancestors,
    constant,
    erase_dead,
    evaluate,
    module_path,
    number_constants,
    source_name,
    symbolic,
    value,
)

logger = logging.getLogger(__name__)
SDPA = (torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default,
        torch.ops.aten.scaled_dot_product_attention)
_VIEWS = {"getitem", "expand", "reshape", "view", "unsqueeze", "flatten", "broadcast_to", "repeat_interleave", "repeat",
          "contiguous", "clone", "expand_as", "squeeze", "transpose", "permute"}
_STANDINS = ((37, 53, 67, 83), (41, 59, 71, 89))  # two sets of small numbers for large ones, in order of size
_DIRECT = 1024  # stored numbers up to here are probed as they are
_LONGEST = 4200  # positions of a probe: 17 Mi entries
_OFFSET = 2  # ``<= w`` for ``< w``, and the like
_MAX_STORED = 8192  # positions of a stored mask that is probed whole: 64 Mi entries
_ALLOWED = {  # positions and sums of them, comparisons, whole-number division, logic, shapes, constants, indexing
    "arange", "add", "iadd", "sub", "isub", "rsub", "neg", "diff", "cumsum", "le", "lt", "ge", "gt", "eq", "ne",
    "floordiv", "floor_divide", "and_", "or_", "xor", "invert", "not_", "logical_and", "logical_or", "logical_not",
    "bitwise_and", "bitwise_or", "bitwise_not", "__and__", "__or__", "iand", "ior", "where", "masked_fill",
    "masked_fill_", "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "zeros", "ones_like",
    "zeros_like", "tril", "triu", "to", "bool", "float", "long", "int", "type", "type_as", "half", "bfloat16", "clone",
    "contiguous", "detach", "getattr", "size", "sym_size", "tensor", "as_tensor", "finfo", "item", "any", "tril_",
    "triu_", "fill_", "copy_", "setitem", "new_tensor", "empty", "scalar_tensor",
} | _VIEWS
_FILLS = {"where", "masked_fill", "masked_fill_", "full", "full_like", "new_full", "fill_", "mul", "imul", "scatter"}


@dataclass(frozen=True)
class MaskKind:
    """What a mask was proven to mean."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None


class Refusal(Exception):
    """This node cannot be raised; the text says why."""


def find_sdpa(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target in SDPA]


def raise_sdpa(gm: fx.GraphModule, inputs: dict[str, Any] | None = None) -> tuple[int, dict[str, str]]:
    """Raise every F.sdpa node of ``gm`` that can be, in place.

    Args:
        gm: a Dynamo graph; its nodes carry fake values.
        inputs: real tensors of placeholders by node name (parameters and buffers), for masks made from stored buffers.

    Returns:
        (number raised, reason by module path of each one refused). Layers are numbered by order in the graph.
    """
    raised, refusals = 0, {}
    for layer, node in enumerate(find_sdpa(gm.graph)):
        where = module_path(node) or node.name
        try:
            _raise_one(node, layer, inputs or {})
            raised += 1
        except Refusal as why:
            refusals[where] = str(why)
    if raised or refusals:
        logger.info("raise_sdpa: %d raised, %d refused", raised, len(refusals))
    return raised, refusals


def _raise_one(node: fx.Node, layer: int, inputs: dict[str, Any]) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arg = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    q: Any = arg["query"]
    k: Any = arg["key"]
    v: Any = arg["value"]
    try:
        dropout, scale = constant(arg.get("dropout_p", 0.0)), constant(arg.get("scale"))
    except ValueError as error:
        raise Refusal(f"its dropout or scale can change: {error}") from error
    if dropout:
        raise Refusal(f"dropout {dropout:g} (call model.eval())")
    q_shape, k_shape = value(q).shape, value(k).shape
    if len(q_shape) != 4:
        raise Refusal(f"query has {len(q_shape)} dimensions, need (B, H, S, D)")
    if str(q_shape[2]) != str(k_shape[2]):
        raise Refusal(f"{k_shape[2]} keys for {q_shape[2]} queries: a KV cache in the graph (call with use_cache=False)")
    heads = q_shape[1]
    k, v = _peel_repeat(k, heads), _peel_repeat(v, heads)
    kv_heads, v_heads = value(k).shape[1], value(v).shape[1]
    if kv_heads != v_heads:
        k, v = arg["key"], arg["value"]
        kv_heads, v_heads = value(k).shape[1], value(v).shape[1]
    if kv_heads != v_heads or heads % kv_heads:
        raise Refusal(f"{heads} query heads, {kv_heads} key heads, {v_heads} value heads")
    if kv_heads not in (1, heads) and k is arg["key"] and not arg.get("enable_gqa", False):
        raise Refusal(f"{heads} query heads over {kv_heads} key heads without enable_gqa")
    mask: Any = arg.get("attn_mask")
    is_causal = arg.get("is_causal", False)
    if mask is None:
        kind = MaskKind(causal=bool(is_causal))
    elif is_causal:
        raise Refusal("both attn_mask and is_causal")
    else:
        kind = identify_mask(mask, q_shape[2], inputs)
    if scale is None:
        scale = value(q).shape[3] ** -0.5
    with node.graph.inserting_before(node):
        new = node.graph.call_function(attention, (q, k, v, None), {
            "layer": layer, "scale": float(scale), "window": kind.window, "softcap": None, "chunk": kind.chunk,
            "causal": kind.causal})
    new.meta = dict(node.meta)
    new.meta["quire_route"] = "raised"
    node.replace_all_uses_with(new)
    old = list(node.all_input_nodes)
    node.graph.erase_node(node)
    erase_dead(node.graph, old)


def _peel_repeat(node: fx.Node, heads: int) -> fx.Node:
    """The un-repeated tensor behind ``node`` if a chain of views provably repeats it to ``heads`` heads, else ``node``."""
    chain, at = [node], node
    while at.op in ("call_function", "call_method") and len(chain) < 8:
        name = at.target if isinstance(at.target, str) else getattr(at.target, "__name__", "")
        data = at.args[0] if at.args else None
        if name.rstrip("_") not in _VIEWS or not isinstance(data, fx.Node):
            break
        at = data
        shape: Any = getattr(value(at), "shape", ())
        # symbolic first: comparing a symbol with a number would guard on it, and the trace would hold for fewer batches
        if len(shape) == 4 and not symbolic(shape[1]) and shape[1] != heads and heads % shape[1] == 0 \
                and _is_repeat(at, node, chain, heads // shape[1]):
            return at
        chain.append(at)
    return node


def _is_repeat(start: fx.Node, end: fx.Node, chain: list[fx.Node], times: int) -> bool:
    """Execute the chain on a random tensor: is it ``repeat_interleave(times, dim=1)``?"""
    batch, kv_heads, tokens, dim = value(start).shape
    length = 5 if symbolic(tokens) else int(tokens)
    probe = torch.randn(1 if symbolic(batch) else int(batch), kv_heads, length, dim)
    env: dict[fx.Node, Any] = {start: probe}
    nodes = [n for n in ancestors(end, stop=lambda n: n is start) if n is not start]
    for n in nodes:
        val = value(n)
        if isinstance(val, torch.SymInt):  # a size of the ragged row, whatever node computes it
            env[n] = length if str(val) == str(tokens) else probe.shape[0]
    try:
        with torch.no_grad():
            evaluate(nodes, env)
    except Exception:  # the chain needs something a repeat does not need: it is none
        return False
    expected = probe.repeat_interleave(times, dim=1)
    return isinstance(env[end], torch.Tensor) and env[end].shape == expected.shape and bool((env[end] == expected).all())


def identify_mask(mask: fx.Node, tokens: Any, inputs: dict[str, Any]) -> MaskKind:
    """Execute the sub-graph of ``mask`` for one sequence at positions 0..n-1 and say which kind it is.

    Raises:
        Refusal: it depends on more than positions, or is none of causal, window, chunk.
    """
    nodes = ancestors(mask)
    stored = {n: inputs[n.name].detach() for n in nodes if _is_stored(n) and isinstance(inputs.get(n.name), torch.Tensor)}
    numbers = _constants(nodes, stored)
    ids = (lambda n: torch.zeros(n, dtype=torch.int64), lambda n: torch.tensor([*numbers, 1] * n)[:n])
    tables = [t.shape[-1] for t in stored.values() if t.dim() >= 2]
    if not symbolic(tokens):
        length = int(tokens)
        if any(c > length for c in numbers):
            raise Refusal(f"the graph was traced for {length} tokens exactly, too few to tell a window from plain causal; "
                          "compile with dynamic=True")
        return _probe(mask, nodes, stored, tokens, length, {}, ids)
    reach = _reach(nodes, numbers)
    if tables:
        length = min(tables)
        if length > _MAX_STORED:
            raise Refusal(f"a stored mask of {length} positions is too large to check")
        if reach > length and any(_name(n) == "arange" for n in nodes):
            raise Refusal(f"a stored mask of {length} positions, too few to check the numbers that go with it")
        return _probe(mask, nodes, stored, tokens, length, {}, ids)
    if reach <= _LONGEST:
        return _probe(mask, nodes, stored, tokens, reach, {}, ids)
    large = [c for c in numbers if c > 100]
    if not large or len(large) > len(_STANDINS[0]):
        raise Refusal("its mask reaches too far to be executed, and not by a few large numbers")
    kinds, maps = [], [dict(zip(large, small, strict=False)) for small in _STANDINS]
    for small in maps:
        length = _reach(nodes, sorted({small.get(c, c) for c in numbers}), small)
        if length > _LONGEST:
            raise Refusal("its mask reaches too far to be executed")
        kinds.append(_probe(mask, nodes, stored, tokens, length, small, ids))
    first, second = kinds
    return MaskKind(first.causal, _translate("window", first.window, second.window, maps),
                    _translate("chunk", first.chunk, second.chunk, maps))


def _translate(what: str, first: int | None, second: int | None, maps: list[dict[int, int]]) -> int | None:
    """The number behind what two probes with different stand-ins saw. See NOTE [Mask probe]."""
    if first is None and second is None:
        return None
    for number in maps[0]:
        offset = (first or 0) - maps[0][number]
        if first is not None and second is not None and abs(offset) <= _OFFSET and second - maps[1][number] == offset:
            return number + offset
    if first == second and first is not None and first <= _DIRECT // 8:  # a small number of its own, in both probes
        return first
    raise Refusal(f"its {what} could not be traced back to one number of the mask")


def _reach(nodes: list[fx.Node], numbers: list[int], small: dict[int, int] | None = None) -> int:
    """Positions that a probe must have so that nothing in the mask reaches further. See NOTE [Mask probe]."""
    divisors: dict[fx.Node, int] = {}
    for node in nodes:
        deepest = max((divisors.get(n, 1) for n in node.all_input_nodes), default=1)
        if _name(node) in ("floordiv", "floor_divide") or (_name(node) == "div" and node.kwargs.get("rounding_mode")):
            by = node.args[1] if len(node.args) > 1 else None
            if isinstance(by, fx.Node) or not isinstance(by, int) or by < 1:
                raise Refusal("its mask divides positions by something that is no constant")
            deepest *= (small or {}).get(by, by)
        elif node.op in ("call_function", "call_method"):
            name = _name(node)
            whole = isinstance(value(node), torch.Tensor) and value(node).dtype == torch.bool
            counts = name == "cumsum" and value(node.args[0]).dtype != torch.bool
            fills = name in ("mul", "imul") and _fills(node)
            if (name not in _ALLOWED and not whole and not fills) or counts:
                raise Refusal(f"its mask computes with positions ({name}), so that how far it reaches cannot be told "
                              "(ALiBi or a bias?)")
        divisors[node] = deepest
    return max(divisors.values(), default=1) * (sum(numbers) + 34) + 5


def _fills(node: fx.Node) -> bool:
    """A product that turns a mask into additive scores: one side is made of truths, the other is a constant."""
    return any(_is_truth(a) for a in node.args) and sum(isinstance(value(a), torch.Tensor) for a in node.args) <= 2


def _is_truth(node: Any) -> bool:
    """Booleans, or 0s and 1s made of them by casting, negating and subtracting from 1."""
    val = value(node)
    if not isinstance(node, fx.Node) or not isinstance(val, torch.Tensor):
        return False
    if val.dtype == torch.bool:
        return True
    tensors = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
    same = _name(node) in _VIEWS | {"to", "float", "type_as", "half", "bfloat16", "int", "long", "sub", "rsub", "neg"}
    return same and len(tensors) == 1 and _is_truth(tensors[0])


def _probe(mask: fx.Node, nodes: list[fx.Node], stored: dict[fx.Node, torch.Tensor], tokens: Any, length: int,
           to_small: dict[int, int], ids: Any) -> MaskKind:
    """Execute the mask for ``length`` positions, with large numbers replaced, for two sets of token ids."""

    def small(node: fx.Node, number: Any) -> Any:
        if abs(number) not in to_small or (type(number) is float and _name(node) in _FILLS):
            return number
        return type(number)(to_small[abs(number)] * (1 if number > 0 else -1))

    masks: list[Any] = []
    for make in ids:
        env = {n: stored.get(n, None) for n in nodes if n.op == "placeholder"}
        env = {n: _probe_input(n, length, tokens, make(length)) if t is None else t for n, t in env.items()}
        try:
            with torch.no_grad():
                evaluate(nodes, env, small)
        except Exception as error:
            raise Refusal(f"its mask could not be executed on probe positions ({type(error).__name__}: {error})") from error
        masks.append(env[mask])
    kind = _classify(masks[0], length)
    if not torch.equal(masks[0], masks[1]):
        raise Refusal("its mask depends on the token ids (a padding mask?); a paged batch has no padding")
    return kind


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _constants(nodes: list[fx.Node], stored: dict[fx.Node, torch.Tensor]) -> list[int]:
    """Sizes of all numbers in a mask's sub-graph that positions may be compared with, rounded up. See NOTE [Mask probe]."""
    found: set[int] = set()
    for node in nodes:
        for c in number_constants(node):
            if type(c) is float and (_name(node) in _FILLS or not math.isfinite(c)):
                continue  # what hidden scores are filled with, such as -10000.0
            if type(c) is float and abs(c) > _DIRECT and not c.is_integer():
                raise Refusal(f"its mask has the constant {c}")
            if abs(c) < 2**31 - 1:
                found.add(math.ceil(abs(c)))
    for node, tensor in stored.items():
        if tensor.dim() < 2 and tensor.numel() and tensor.dtype != torch.bool:
            size = tensor.abs().max().item()
            if size >= 2**31 - 1:
                continue  # no position is that large: what hidden scores are filled with
            if size > _DIRECT:
                raise Refusal(f"its mask depends on {source_name(node)}, a number too large to probe")
            found.add(math.ceil(size))
    return sorted(found)


def _is_stored(node: fx.Node) -> bool:
    """Is this placeholder a parameter, a buffer or an attribute of a module, and not an argument of the call?"""
    return node.op == "placeholder" and re.fullmatch(r"[LG]\['\w+'\](\[[^\]]*\])*", source_name(node)) is None


def _probe_input(node: fx.Node, length: int, tokens: Any, ids: torch.Tensor) -> Any:
    val, name = value(node), source_name(node)
    if isinstance(val, torch.SymInt):
        if str(val) == str(tokens):
            return length
        raise Refusal(f"its mask depends on {name}")
    if not isinstance(val, torch.Tensor):
        raise Refusal(f"its mask depends on {name}")
    shape = [length if str(s) == str(tokens) else s for s in val.shape]
    if any(symbolic(s) for s in shape):
        raise Refusal(f"its mask depends on {name}, of shape {tuple(val.shape)}")
    if "attention_mask" in name:
        raise Refusal("an attention_mask was passed; a paged batch is ragged and takes none")
    if any(word in name for word in ("position_ids", "cache_position", "positions")):
        return torch.arange(length, device=val.device).expand(shape)
    if any(word in name for word in ("input_ids", "inputs_embeds", "idx", "tokens")):
        return ids.to(val).expand(shape) if shape and shape[-1] == length else torch.zeros(shape).to(val)
    raise Refusal(f"its mask depends on {name}")


def _classify(mask: Any, length: int) -> MaskKind:
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or tuple(mask.shape[-2:]) != (length, length):
        raise Refusal(f"its mask has shape {tuple(getattr(mask, 'shape', ()))}, not (..., {length}, {length})")
    flat = mask.reshape(-1, length, length).cpu()
    if not bool((flat == flat[:1]).all()):
        raise Refusal("its mask differs between heads or sequences (ALiBi or a bias)")
    keep = flat[0]
    if keep.dtype != torch.bool:
        if not bool(((keep == 0) | (keep <= -1e4)).all()):
            raise Refusal("a float bias is added to the scores (ALiBi or relative positions)")
        keep = keep == 0
    pos = torch.arange(length)
    candidates: list[MaskKind] = [MaskKind()]
    seen = int(keep[-1].sum())
    if 0 < seen < length:
        candidates.append(MaskKind(window=seen))
    hidden = (~keep[:, 0]).nonzero()
    if len(hidden) and int(hidden[0]) > 0:
        candidates.append(MaskKind(chunk=int(hidden[0])))
    for kind in candidates:
        if torch.equal(keep, visible(pos[:, None], pos[None], window=kind.window, chunk=kind.chunk, causal=True)):
            return kind
    if bool(keep.all()):
        return MaskKind(causal=False)
    raise Refusal("its mask is none of causal, sliding window, chunk")


__all__ = ["MaskKind", "Refusal", "find_sdpa", "identify_mask", "raise_sdpa"]

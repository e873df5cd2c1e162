"""Route 2, the raising pass: F.scaled_dot_product_attention nodes become the semantic op, where that is proven to be the same.

Before::

    k_rep = reshape(expand(k[:, :, None]), ...)             # GQA repeat, in whatever spelling
    mask  = arange(S) ... <= ... & ...                      # built by the model
    out   = scaled_dot_product_attention(q, k_rep, v_rep, attn_mask=mask, scale=s)

After::

    out   = quire.attention(q, k, v, None, layer=i, scale=s, window=w, chunk=c, causal=True, ...)

Nothing is matched by its spelling. The mask is read as a condition on positions and proven equal to a causal, window or chunk
mask (``passes/verify/mask_proof.py``). The repeat is recognized by running the chain of views from k to k_rep on random numbers
and comparing with ``repeat_interleave``.

Refused, with the reason in ``refusals``: dropout, a float bias (ALiBi, relative positions), a mask that is not proven to be of
a known kind, keys longer than queries (a KV cache in the graph), heads that are neither equal nor a repeat. Left as it is: a
call whose number of keys does not depend on the tokens (each token attends over its own heads, or to a stored memory), which
the proof of all other operations covers (``passes/verify/tokens.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor

from quire.attn_ops.attention import attention
from quire.passes.fake_values import compute_value
from quire.passes.fx import ancestors, constant, erase_dead, evaluate, module_path, sdpa_arguments, symbolic, target_name, value
from quire.passes.rewrite import raise_written
from quire.passes.rewrite.einsum_products import multiply_einsums
from quire.passes.rewrite.in_place_scores import change_scores_out_of_place
from quire.passes.rewrite.multihead import SAID_CAUSAL, write_out_multihead
from quire.passes.rewrite.written_softmax import join_softmax
from quire.passes.verify.mask_proof import MaskKind, MaskProver, Refusal

logger = logging.getLogger(__name__)
SDPA: tuple[Any, ...] = (torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default,
        torch.ops.aten.scaled_dot_product_attention)
_VIEWS = {"getitem", "expand", "reshape", "view", "unsqueeze", "flatten", "broadcast_to", "repeat_interleave", "repeat",
          "contiguous", "clone", "expand_as", "squeeze", "transpose", "permute"}
_WITHIN = "quire_attends_within_tokens"
_PROBES = (5, 11)  # tokens


def find_sdpa(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that attend over tokens, and are not raised."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in SDPA and not n.meta.get(_WITHIN)]


def raise_sdpa(gm: fx.GraphModule, inputs: dict[str, Any] | None = None) -> tuple[int, dict[str, str]]:
    """Raise every F.sdpa node of ``gm`` that can be, in place; layers are numbered by order. Returns their number, and the
    reason by module path of each one refused. ``gm.meta["quire_stored_masks"]`` then checks in each call that stored masks are
    those of the proof, which holds for sequences of up to ``gm.meta["quire_mask_length"]`` tokens (None: any). ``inputs``: real
    tensors of placeholders by node name, for masks made from stored buffers."""
    raised, refusals = 0, {}
    write_out_multihead(gm.graph)
    change_scores_out_of_place(gm.graph)
    multiply_einsums(gm.graph)
    join_softmax(gm.graph)
    written = {raise_written.insert(each): each for each in raise_written.find(gm.graph)}
    nodes = find_sdpa(gm.graph)
    tokens = _tokens(nodes)
    for node in nodes if symbolic(tokens) else ():
        node.meta[_WITHIN] = not symbolic(value(sdpa_arguments(node)["key"]).shape[-2])
        if node in written and node.meta[_WITHIN]:
            raise_written.settle(written.pop(node), node, raised=False)
    nodes = find_sdpa(gm.graph)
    prover = MaskProver(gm.graph, tokens, inputs or {})
    for layer, node in enumerate(nodes):
        where = module_path(node) or node.name
        try:
            _raise_one(node, layer, prover)
            done = True
        except Refusal as why:
            refusals[where], done = str(why), False
        raised += done
        if node in written:
            raise_written.settle(written[node], node, done)
    gm.meta["quire_stored_masks"], gm.meta["quire_mask_length"] = prover.stored(), prover.longest
    prover.erase_dead_writes()
    if raised or refusals:
        logger.info("raise_sdpa: %d raised, %d refused", raised, len(refusals))
    return raised, refusals


def _tokens(nodes: list[fx.Node]) -> Any:
    """The size of the token dimension: that of the first queries whose number is not constant."""
    sizes = [q.shape[-2] for n in nodes if (q := value(sdpa_arguments(n)["query"])).dim() > 1]
    return next(filter(symbolic, sizes), sizes[0] if sizes else None)


def _raise_one(node: fx.Node, layer: int, prover: MaskProver) -> None:
    arg = sdpa_arguments(node)
    q, k, v = arg["query"], arg["key"], arg["value"]
    try:
        dropout, scale = constant(arg.get("dropout_p", 0.0)), constant(arg.get("scale"))
    except ValueError as error:
        raise Refusal(f"its dropout or scale can change: {error}") from error
    if dropout:
        raise Refusal(f"dropout {dropout:g} (call model.eval())")
    if is_functorch_wrapped_tensor(value(q)):
        raise Refusal("it is called inside torch.vmap; give it all heads at once")
    missing = 4 - value(q).dim()
    if missing < 0 or any(value(x).dim() != value(q).dim() for x in (k, v)):
        raise Refusal(f"query has {value(q).dim()} dimensions, need (B, H, S, D), (H, S, D) or (S, D), and as many of key and "
                      "value")
    q_shape, k_shape = (torch.Size([1] * missing) + value(x).shape for x in (q, k))
    if str(q_shape[2]) != str(k_shape[2]):
        raise Refusal(f"{k_shape[2]} keys for {q_shape[2]} queries: a KV cache in the graph (call with use_cache=False)")
    heads = q_shape[1]
    if not missing:
        k, v = (_peel_repeat(x, heads, lambda n: prover.written_between(n, node)) for x in (k, v))
    kv_heads, v_heads = _heads(k), _heads(v)
    if kv_heads != v_heads:
        k, v = arg["key"], arg["value"]
        kv_heads, v_heads = _heads(k), _heads(v)
    if any(map(symbolic, (heads, kv_heads, v_heads))):
        raise Refusal(f"{heads} query heads over {kv_heads} key heads: their number is not constant")
    if kv_heads != v_heads or heads % kv_heads:
        raise Refusal(f"{heads} query heads, {kv_heads} key heads, {v_heads} value heads")
    if kv_heads not in (1, heads) and k is arg["key"] and not arg.get("enable_gqa", False):
        raise Refusal(f"{heads} query heads over {kv_heads} key heads without enable_gqa")
    mask, is_causal = arg.get("attn_mask"), arg.get("is_causal", False)
    if mask is None:
        kind = MaskKind(causal=bool(is_causal))
    elif is_causal:
        raise Refusal("both attn_mask and is_causal")
    else:
        kind = prover.prove(mask, node)
    if node.meta.get(SAID_CAUSAL) and kind != MaskKind():
        raise Refusal("its mask is not causal, and its is_causal says that it is: PyTorch's paths then differ")
    if scale is None:
        scale = value(q).shape[-1] ** -0.5
    with node.graph.inserting_before(node):
        for _ in range(missing):
            q, k, v = (compute_value(node.graph.call_method("unsqueeze", (x, 0))) for x in (q, k, v))
        if (dtype := value(node).dtype) != value(q).dtype:  # torch.autocast casts what it calls, and not the semantic op
            q, k, v = (compute_value(node.graph.call_method("to", (x, dtype))) for x in (q, k, v))
        new = result = node.graph.call_function(attention, (q, k, v, None), {
            "layer": layer, "scale": float(scale), "window": kind.window, "softcap": node.meta.get(raise_written.SOFTCAP),
            "chunk": kind.chunk, "causal": kind.causal})
        new.meta = {**node.meta, "quire_route": "raised"}
        if missing:
            compute_value(new)
        for _ in range(missing):
            result = compute_value(node.graph.call_method("squeeze", (result, 0)))
    node.replace_all_uses_with(result)
    old = list(node.all_input_nodes)
    node.graph.erase_node(node)
    erase_dead(node.graph, old)


def _heads(x: fx.Node) -> Any:
    return value(x).shape[-3] if value(x).dim() > 2 else 1


def _peel_repeat(node: fx.Node, heads: int, is_changed: Callable[[fx.Node], bool]) -> fx.Node:
    """The un-repeated tensor behind ``node`` if a chain of views provably repeats it to ``heads`` heads, else ``node``.
    ``is_changed``: whether a value is changed in place before attention reads it."""
    at = node
    for _ in range(7):
        data = at.args[0] if at.args else None
        if at.op not in ("call_function", "call_method") or target_name(at).rstrip("_") not in _VIEWS \
                or not isinstance(data, fx.Node) or is_changed(at) or is_changed(data):
            break
        at = data
        shape: Any = getattr(value(at), "shape", ())
        # symbolic first: comparing a symbol with a number would guard on it, and the trace would hold for fewer batches
        if len(shape) == 4 and not symbolic(shape[1]) and not symbolic(shape[3]) and shape[1] != heads \
                and heads % shape[1] == 0 and _is_repeat(at, node, heads // shape[1]):
            return at
    return node


def _is_repeat(start: fx.Node, end: fx.Node, times: int) -> bool:
    """Execute the chain on random tensors: is it ``repeat_interleave(times, dim=1)``? Only of a chain that does the same at any
    length: what it takes beside the tensor are constants, and the sizes of its tokens and its batch."""
    batch, kv_heads, tokens, dim = value(start).shape
    at = end
    while at is not start:
        others = at.all_input_nodes[1:] if target_name(at) != "expand_as" else []
        if at.all_input_nodes[0] is not at.args[0] or not all(
                isinstance(value(n), torch.SymInt) and str(value(n)) in (str(tokens), str(batch)) for n in others):
            return False
        at = at.args[0]
    nodes = [n for n in ancestors(end, stop=lambda n: n is start) if n is not start]
    for length in _PROBES if symbolic(tokens) else (int(tokens),):
        probe = torch.randn(1 if symbolic(batch) else int(batch), kv_heads, length, dim, dtype=torch.float32)
        env: dict[fx.Node, Any] = {start: probe}
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
        if not isinstance(env[end], torch.Tensor) or env[end].shape != expected.shape or not bool((env[end] == expected).all()):
            return False
    return True

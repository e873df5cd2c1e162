"""PyTorch's operations that attend as a whole, written out, for ``raise_sdpa`` to read.

Before::

    out, weights = multi_head_attention_forward(x, x, x, ...)        # of nn.MultiheadAttention; nobody reads the weights
    y = _transformer_encoder_layer_fwd(x, ...)                       # of nn.TransformerEncoderLayer without gradients

After::

    q, k, v = (transpose(unflatten(t, -1, (heads, -1)), -3, -2) for t in chunk(linear(x, w, b), 3, -1))
    out = linear(flatten(transpose(scaled_dot_product_attention(q, k, v, attn_mask=mask), -3, -2), -2), w_out, b_out)
    y = norm2(h + linear2(relu(linear1(h)))), h = norm1(x + out)     # or each norm before its part

Where the caller says that a mask is causal, some of PyTorch's paths read the mask and others do not: SAID_CAUSAL in the meta of
the call says so. Left as it is: attention whose weights are read, with keys of its own (``add_bias_kv``, ``add_zero_attn``), in
torch.autocast or in torch.vmap.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor

from quire.passes.fake_values import compute_value
from quire.passes.fx import named_arguments, symbolic, value

SAID_CAUSAL = "quire_said_causal"
_ATTENTION = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
_LAYER = ("x", "embed_dim", "heads", "w", "b", "w_out", "b_out", "gelu", "norm_first", "eps", "w_norm1", "b_norm1", "w_norm2",
          "b_norm2", "w1", "b1", "w2", "b2", "mask", "mask_type")
_ADDED = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
_OF_TOKENS = 1  # a ``mask_type``: (N, S), of padding; others are of queries and keys


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Writes what is called on proxies into the graph, as of the node ``of``."""

    def __init__(self, of: fx.Node) -> None:
        super().__init__(of.graph)
        self.of = of

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        new = super().create_node(*args, **kwargs)
        new.meta = dict(self.of.meta)  # the place in the user's code
        return compute_value(new)


def _of(proxy: Any) -> Any:
    return value(proxy.node)


def write_out_multihead(graph: fx.Graph) -> int:
    """Replace them in place; returns how many."""
    return sum([_write_out(node) for node in graph.nodes if node.op == "call_function" and node.target in _WRITTEN])


def _write_out(node: fx.Node) -> bool:
    function, names = _WRITTEN[node.target]
    given, results = named_arguments(node, names), [node]
    if len(node.args) > len(names) or not _read_alike(given, function):
        return False
    if function is _attention:
        results = [n for n in node.users if n.target is operator.getitem and n.args[1] == 0]
        if len(results) != len(node.users) or any(given.get(name) not in (None, False) for name in _ADDED):
            return False
    dtypes = {value(x).dtype for x in (given[names[0]], *results)}
    if len(dtypes) != 1 or is_functorch_wrapped_tensor(value(given[names[0]])):
        return False
    with node.graph.inserting_before(node):
        tracer = _Tracer(node)
        proxies = {x: fx.Proxy(x, tracer) for x in node.all_input_nodes}  # one of each: that x is q, k and v stays to be seen
        new = function(**{name: proxies.get(x, x) if isinstance(x, fx.Node) else x for name, x in given.items()})
    for result in results:
        result.replace_all_uses_with(new.node)
    for old in dict.fromkeys((*results, node)):
        node.graph.erase_node(old)
    return True


def _read_alike(given: dict[str, Any], function: Any) -> bool:
    """Whether PyTorch reads the mask as it is written out here: of keys that are not the tokens' it leaves out one that is said
    to be causal, and gives NaN where a mask hides all of them, and no proof of a mask comes later."""
    read, tokens = ("is_causal", value(given["key"]).shape[0]) if function is _attention else (
        "mask", value(given["x"]).shape[1])
    return given.get(read) in (None, False) or symbolic(tokens)


def _attention(query: Any, key: Any, value: Any, num_heads: int, in_proj_weight: Any, in_proj_bias: Any, out_proj_weight: Any,
               out_proj_bias: Any, dropout_p: float, training: bool = True, key_padding_mask: Any = None,
               need_weights: bool = True, attn_mask: Any = None, is_causal: bool = False,
               use_separate_proj_weight: bool = False, q_proj_weight: Any = None, k_proj_weight: Any = None,
               v_proj_weight: Any = None, **unused: Any) -> Any:
    """As F.multi_head_attention_forward, of (S, N, E) or (S, E)."""
    batched, mask = _of(query).dim() == 3, attn_mask
    if mask is not None:
        mask = _added(mask, _of(query).dtype)
        mask = mask.unflatten(0, (-1, num_heads)) if batched and _of(mask).dim() == 3 else mask
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, _of(query).dtype)[..., None, None, :]
        mask = padding if mask is None else mask + padding
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    xs = [query] if query is key is value and not use_separate_proj_weight else [query, key, value]
    xs = [x.transpose(0, 1) for x in xs] if batched else xs
    said, dropout = is_causal and key_padding_mask is None and not need_weights, dropout_p if training else 0.0
    out = _attend(xs, num_heads, weights, in_proj_bias, out_proj_weight, out_proj_bias, mask, dropout, said)
    return out.transpose(0, 1) if batched else out


def _layer(x: Any, heads: int, w: Any, b: Any, w_out: Any, b_out: Any, gelu: bool, norm_first: bool, eps: float, w_norm1: Any,
           b_norm1: Any, w_norm2: Any, b_norm2: Any, w1: Any, b1: Any, w2: Any, b2: Any, mask: Any, mask_type: int | None,
           embed_dim: int) -> Any:
    """As torch._transformer_encoder_layer_fwd, which takes any mask as truths, of (N, S, E)."""
    def norm(x: Any, weight: Any, bias: Any, here: bool) -> Any:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps) if here else x

    def activate(x: Any) -> Any:  # as PyTorch's own decomposition of aten._addmm_activation does
        return F.gelu(x, approximate="tanh" if _of(x).is_cuda else "none") if gelu else F.relu(x)

    if mask is not None:
        mask = _added(mask.to(torch.bool), _of(x).dtype)
        mask = mask[:, None, None, :] if mask_type == _OF_TOKENS else mask
    out = _attend([norm(x, w_norm1, b_norm1, norm_first)], heads, w, b, w_out, b_out, mask)
    x = norm(x + out, w_norm1, b_norm1, not norm_first)
    out = F.linear(activate(F.linear(norm(x, w_norm2, b_norm2, norm_first), w1, b1)), w2, b2)
    return norm(x + out, w_norm2, b_norm2, not norm_first)


def _attend(xs: list[Any], heads: int, w: Any, b: Any, w_out: Any, b_out: Any, mask: Any, dropout: float = 0.0,
            said_causal: bool = False) -> Any:
    """Attention of (..., S, E) projected by ``w`` and ``b``, one tensor of all or one of queries, keys and values each."""
    if len(xs) == 1:
        both = F.linear(xs[0], w, b).chunk(3, -1)
        q, k, v = both[0], both[1], both[2]
    else:
        w, b = w if isinstance(w, tuple) else w.chunk(3), [None] * 3 if b is None else b.chunk(3)
        q, k, v = (F.linear(x, w[i], b[i]) for i, x in enumerate(xs))
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-3, -2) for t in (q, k, v))
    out: Any = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    out.node.meta[SAID_CAUSAL] = said_causal
    return F.linear(out.transpose(-3, -2).flatten(-2), w_out, b_out)


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """A mask as what is added to scores; truths hide."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf) if _of(mask).dtype == torch.bool else mask


_WRITTEN: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    F.multi_head_attention_forward: (_attention, _ATTENTION), torch._transformer_encoder_layer_fwd: (_layer, _LAYER)}

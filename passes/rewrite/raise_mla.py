"""MLA on the latent cache: attention whose keys and values are made from latent vectors becomes ``quire::mla_attention``.

Before, as transformers writes DeepSeek-V2 and its relatives::

    k_nope, v = split(view(linear(c, kv_b), (1, T, H, Dn + Dv)).transpose(1, 2), [Dn, Dv])
    k = new_empty(1, H, T, Dn + R); k[..., :Dn] = k_nope; k[..., Dn:] = k_rope         # or cat; k_rope is that of every head
    out = quire.attention(q, k, v, None, layer=i, scale=s, ...)

After::

    out = quire.mla_attention(q, reshape(c, (1, -1, rank)), reshape(k_rope, (1, -1, R)), kv_b, layer=i, scale=s)

Nothing is matched by its spelling. Between ``linear`` and ``k_rope`` on the one side and k and v on the other there may be any
operations that only move numbers (``_MOVES``). They are run on numbers that are all different, for two lengths: the result
shows where each number of k and v comes from, and must be the one above. How c, k_rope and q are made does not matter.

Left as it is: a layer whose k or v are anything else (scaled, rotated or biased after kv_b, split otherwise), with a window,
chunk, softcap or sinks, with a kv_b that is not a plain parameter (quantized, adapted), or whose latent vectors are no smaller
than its keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.mla import mla_attention
from quire.passes.fake_values import compute_value
from quire.passes.fx import LINEAR, ancestors, erase_dead, evaluate, is_method, is_tensor, only_user, value, written_by
from quire.passes.verify.sites import site_nodes, site_of

logger = logging.getLogger(__name__)
#: Operations that move numbers, and neither change nor combine them.
_MOVES = ("getitem", "expand", "expand_as", "broadcast_to", "reshape", "view", "unsqueeze", "squeeze", "flatten", "unflatten",
          "transpose", "permute", "movedim", "contiguous", "clone", "split", "split_with_sizes", "chunk", "narrow", "cat",
          "concat", "stack", "unbind", "repeat", "repeat_interleave")
_FRESH = ("new_empty", "empty", "empty_like", "new_zeros", "zeros", "zeros_like")
_LENGTHS = (5, 7)  # tokens of the probes


@dataclass(frozen=True)
class MlaSite:
    """What an attention node's keys and values are made of. ``writes``: the nodes that fill a key made by new_empty."""

    node: fx.Node
    c: fx.Node
    k_rope: fx.Node
    kv_b: fx.Node
    latent: Latent
    writes: tuple[fx.Node, ...]


def with_latents(gm: fx.GraphModule, sites: list[AttentionSite]) -> list[AttentionSite]:
    """The sites of ``gm``, in its order, with ``latent`` set for those that ``raise_mla`` rewrites."""
    found = ((_match(node), site) for node, site in zip(site_nodes(gm.graph), sites, strict=True))
    return [site if match is None else replace(site, latent=match.latent) for match, site in found]


def raise_mla(gm: fx.GraphModule) -> int:
    """Rewrite every attention node of ``gm`` that is proven to be MLA, in place; returns their number."""
    matches = [match for node in site_nodes(gm.graph) if (match := _match(node)) is not None]
    for match in matches:
        _rewrite(match)
    if matches:
        gm.graph.lint()
        logger.info("raise_mla: %d layers on latent vectors of %d+%d numbers", len(matches), *matches[0].latent)
    return len(matches)


def _rewrite(match: MlaSite) -> None:
    node, graph = match.node, match.node.graph
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    with graph.inserting_before(node):
        rows = [graph.call_method("reshape", (x, (1, -1, n)))
                for x, n in zip((match.c, match.k_rope), match.latent, strict=True)]
    for row in rows:
        compute_value(row)
    node.target, node.args = mla_attention, (q, *rows, match.kv_b)
    node.kwargs = {name: node.kwargs[name] for name in ("layer", "scale")}
    read = [n for write in match.writes for n in write.all_input_nodes if n not in match.writes]
    for write in reversed(match.writes):
        graph.erase_node(write)
    erase_dead(graph, [*read, k, v])


def _match(node: fx.Node) -> MlaSite | None:
    """The parts of an attention node that is proven to be MLA, else None."""
    if node.target is mla_attention:
        return None
    site, (q, k, v) = site_of(node), node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    tokens = value(q).shape[2]
    plain = site.causal and not site.sinks and (site.window, site.softcap, site.chunk) == (None, None, None)
    if not plain or site.num_heads != site.num_kv_heads or not isinstance(tokens, torch.SymInt) \
            or str(value(q).shape[0]) != "1":
        return None
    _, sources = _moved(v, lambda n: False, ())
    product = next(iter(sources))
    if len(sources) > 1 or product.target not in LINEAR or not all(map(is_tensor, product.args[:2])):
        return None
    c, kv_b, *bias = (*product.args, *product.kwargs.values())
    assert isinstance(c, fx.Node) and isinstance(kv_b, fx.Node)
    weight = value(kv_b)
    if any(b is not None for b in bias) or kv_b.op != "placeholder" or type(weight) is not FakeTensor:
        return None
    if weight.dim() != 2 or not weight.is_contiguous() or weight.shape[0] % site.num_heads:
        return None
    latent = Latent(int(weight.shape[1]), site.head_dim + site.head_dim_v - int(weight.shape[0]) // site.num_heads)
    if not 0 < latent.rope < site.head_dim or sum(latent) >= site.num_heads * (site.head_dim + site.head_dim_v):
        return None

    def is_rotary(n: fx.Node) -> bool:
        of_product = product in _moved(n, lambda m: m is product, ())[1]
        # As text: comparing symbols could add a guard.
        return is_tensor(n) and not of_product and str(value(n).numel()) == str(tokens * latent.rope)

    writes = _writes(k, node)
    inside, sources = _moved(k, lambda n: n is product or is_rotary(n), writes)
    rotary = [n for n in sources if n is not product]
    if product not in sources or len(rotary) != 1 or not is_rotary(rotary[0]):
        return None
    if len({value(x).dtype for x in (q, c, rotary[0], kv_b)}) > 1 or _changed((c, rotary[0]), product, node, writes):
        return None
    chain = inside | _moved(v, lambda n: False, ())[0] | set(writes)
    given = all(_same(chain, node, {product: 1, rotary[0]: -1}, length, site, latent) for length in _LENGTHS)
    return MlaSite(node, c, rotary[0], kv_b, latent, writes) if given else None


def _moved(end: fx.Node, stop: Callable[[fx.Node], bool], writes: tuple[fx.Node, ...]) -> tuple[set[fx.Node], set[fx.Node]]:
    """(nodes that only move numbers on the way to ``end``, nodes where the numbers come from). ``writes``: into ``end``."""
    inside, sources, todo = set[fx.Node](), set[fx.Node](), [end]
    while todo:
        n = todo.pop()
        if n in inside or n in sources:
            continue
        if n is end and writes:
            inside.add(n)
            todo += [x for w in writes for x in w.all_input_nodes if x is not end and _holds_tensors(x)]
        elif not stop(n) and is_method(n, *_MOVES):
            inside.add(n)
            todo += [x for x in n.all_input_nodes if _holds_tensors(x)]
        else:
            sources.add(n)
    return inside, sources


def _holds_tensors(node: fx.Node) -> bool:
    return isinstance(value(node), (torch.Tensor, tuple, list))


def _writes(k: fx.Node, node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that fill a key made by new_empty: ``k[...] = x``, or ``k[...].copy_(x)``; none if it is used otherwise."""
    nodes: set[fx.Node] = set()
    for use in set(k.users) - {node}:
        whole = is_method(use, "setitem")
        write = use if whole else only_user(use)
        if write is None or write.users or k in write.args[1:] or write.args[0] is not (k if whole else use):
            return ()
        if not write < node or not (whole or is_method(use, "getitem") and is_method(write, "copy_")):
            return ()
        nodes |= {use, write}
    return tuple(sorted(nodes)) if is_method(k, "new_empty") else ()


def _changed(made: tuple[fx.Node, fx.Node], product: fx.Node, last: fx.Node, writes: tuple[fx.Node, ...]) -> bool:
    """Whether c or k_rope (``made``), or kv_b, may be changed in place before ``last`` reads them. Memory that the graph makes
    does not matter, if they are not made from it."""
    node = min(product, made[1]).next
    while node is not last:
        for x in written_by(node) if node not in writes else ():
            while is_method(x, *_MOVES) and isinstance(x.args[0], fx.Node):
                x = x.args[0]
            if not is_method(x, *_FRESH) or any(x in ancestors(n) for n in made):
                return True
        node = node.next
    return False


def _same(chain: set[fx.Node], node: fx.Node, sources: dict[fx.Node, int], length: int, site: AttentionSite, latent: Latent
          ) -> bool:
    """Whether ``chain`` brings the numbers of product (1, 2, ...) and rotary key (-1, -2, ...) to where MLA has them."""
    q, k, v = node.args[:3]
    assert isinstance(k, fx.Node) and isinstance(v, fx.Node)
    tokens = value(q).shape[2].node
    symbol = tokens.shape_env.replace(tokens.expr)

    def size(x: Any) -> int:
        if isinstance(x, torch.SymInt):
            x = x.node.shape_env.replace(x.node.expr).subs(symbol, length)
        return int(x)  # TypeError if it depends on anything else

    try:
        env: dict[fx.Node, Any] = {}
        for source, sign in sources.items():
            shape = [size(n) for n in value(source).shape]
            env[source] = sign * torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape)
        product, rotary = env.values()
        nodes = sorted(chain)
        for n in nodes:
            env |= {x: size(value(x)) for x in n.all_input_nodes if isinstance(value(x), (int, torch.SymInt))}
        if is_method(k, "new_empty"):
            env[k] = torch.full([size(n) for n in value(k).shape], float("nan"), dtype=torch.float64)
        evaluate(nodes, env)
    except Exception:  # it needs something that moving numbers does not need
        return False
    nope = site.head_dim - latent.rope
    both = product.reshape(1, length, site.num_heads, -1).transpose(1, 2)
    keys = torch.cat([both[..., :nope], rotary.reshape(1, 1, length, -1).expand(-1, site.num_heads, -1, -1)], dim=-1)
    return bool(torch.equal(env[k], keys) and torch.equal(env[v], both[..., nope:]))

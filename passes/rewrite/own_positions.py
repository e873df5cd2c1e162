"""Numbers of tokens that a model makes itself: positions take their place.

A model that is given token ids alone counts them, or takes the first rows of a stored table. Of one sequence alone these are
its positions; of a ragged row only the step knows them. Before (T tokens)::

    pos = arange(0, T);  x = embedding(ids) + embedding(pos, w);  q = q * cos[:T]

After::

    pos = reshape(positions, -1);  x = embedding(ids) + embedding(pos, w);  q = q * index_select(cos, 0, reshape(positions, -1))

``positions`` is the input ``position_ids`` of a transformers model whose graph has one, else a new last input, ``POSITIONS``
(1, T) int64, which ``TracedGraph`` takes from the step: a module of the user's may be called with numbers of another kind.

Why it is right: with positions 0, 1, 2, ... the graph is the same, number by number, so one sequence alone gets what the model
gives it. And ``check_tokens`` proves of the new graph that each token's row follows from its id, its position and attention, so
that it gets this in a ragged row and in a later step too. What is put in place of what must therefore be equal, and nothing
else need be known of the model. It is

* ``arange`` from 0 in steps of 1, in a dtype that holds each of these numbers. One that only picks rows of tokens (to route
  them) stays: it means the place in the row.
* ``table[:T]``, in one dimension of a fixed size, whatever else is taken of the others (``table[:, :T, None]``, ``narrow``).

Refused: such numbers that are both computed with and pick rows, or lie in memory that anything changes in place, or on another
device. Other ways to count (``linspace``, ``T - 1 - arange(T)``, ``table[1 : T + 1]``, ...) stay, and ``check_positions`` or
``check_tokens`` refuses what follows from them.

A sequence may be as long as the shortest table that positions pick rows of (``gm.meta[TABLES]``): beyond, the model's own
forward fails, and a kernel of a GPU would read other memory. A table that is looked up by whole numbers of which more is
computed than a formula of one position has rows for as many positions as rows. By hand, Dynamo calls the forward with the whole
row, which such a model, or its assertion, may refuse though each sequence is short enough.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.step import Step
from quire.passes.fake_values import compute_value, made_like
from quire.passes.fx import (
    add_input,
    argument,
    dims_of,
    evaluate,
    fake_mode,
    is_tensor,
    items_of,
    last_key,
    longest_shown,
    module_path,
    placeholders,
    same_shape,
    sizes_of,
    storage_of,
    symbolic,
    target_name,
    torch_name,
    value,
    written_memory,
)
from quire.passes.rewrite.last_alone import LAST_ALONE
from quire.passes.rewrite.length_rope import LIMITS

#: The input that is added to a graph whose model reads no positions.
POSITIONS = "quire_positions"
#: In the meta of a graph: of each table that positions pick rows of, what it is, and for how many positions it has rows.
TABLES = "quire_position_tables"
_OWN = "quire_own_positions"
#: They hold each number from 0 to 2**24. In bfloat16, ``arange`` and positions round to other numbers.
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
#: Functions and methods that pass numbers on as they are.
_PASSED_ON = frozenset({"view", "reshape", "unsqueeze", "squeeze", "expand", "flatten", "to", "long", "int", "contiguous",
                        "clone", "detach", "type", "transpose", "permute", "repeat_interleave", "expand_as", "view_as",
                        "type_as", "repeat", "broadcast_to", "tile", "stack", "cat"})
#: Those that make a number of one other, and of numbers in the graph.
_FORMULA = frozenset({"add", "sub", "rsub", "mul", "floordiv", "floor_divide", "mod", "remainder", "neg", "abs", "clamp",
                      "clamp_min", "clamp_max", "clip", "pow", "div", "lshift", "rshift"})
#: Those that index a dimension: where the dimension and the index stand among the arguments.
_PICKING = {**dict.fromkeys(("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add",
                             "index_add_", "index_copy", "index_copy_", "index_fill"), (1, 2)), "take_along_dim": (2, 1)}
_MANY = 2**20  # positions that are tried for tables


def use_given_positions(gm: fx.GraphModule, tokens: Any, has_config: bool) -> int:
    """Put positions in the place of the numbers that a graph, after raising, makes of the length ``tokens`` of its row, in
    place; see the module's docstring. ``has_config``: of a transformers model. Returns how many. Raises UnsupportedAttention:
    what was found, and what to do."""
    graph = gm.graph
    if not symbolic(tokens) or tokens.node.expr.is_number:
        return 0  # which ``check_tokens`` refuses
    cuts = {n: cut for n in graph.nodes if n.users and (cut := _cut_of(n, tokens)) is not None}
    found = [n for n in graph.nodes if n in cuts or (is_numbering(n, tokens) and _uses(n)[1])]
    if not found:
        return 0
    given = next((n for n in placeholders(graph) if has_config and n.users and last_key(n) == "position_ids"
                  and _is_row(n, tokens)), None)
    given = given or _added(graph, tokens, value(found[0]).device)
    written, replaced = written_memory(graph), [module_path(n) or n.name for n in found]
    flat, tables = list[fx.Node](), dict[str, int]()
    for node, where in zip(found, replaced, strict=True):
        if not written.isdisjoint(storage_of(value(n)) for n in (node, given)):
            raise UnsupportedAttention(
                f"{where} numbers the tokens of the row ({node.format_node()}), and these numbers, or position_ids, are "
                "changed in place; in a ragged row every sequence has positions of its own. Compute with position_ids, and out "
                "of place.")
        if node in cuts:
            _take_rows(graph, node, given, *cuts[node])
            table, dim, _ = cuts[node]
            tables[where] = min(tables.get(where, _MANY), int(value(table).shape[dim]))
        else:
            _check_numbering(node, where)
            flat += _take_positions(graph, node, given, where)
    for where, rows, _ in _tables_of(graph, flat):
        tables[where] = min(tables.get(where, _MANY), rows)
    gm.meta[_OWN], gm.meta[TABLES] = replaced, tables
    graph.lint()
    gm.recompile()
    return len(replaced)


def given_tables(graph: fx.Graph, tokens: Any) -> dict[str, int]:
    """Of each table that ``position_ids``, or formulas of them, pick rows of, what it is, and for how many positions from 0 on
    it has a row, if not for all that are tried."""
    found: dict[str, int] = {}
    for node in placeholders(graph):
        if node.users and last_key(node) == "position_ids" and _is_row(node, tokens):
            for where, rows, known in _tables_of(graph, [node]):
                if known:
                    found[where] = min(found.get(where, _MANY), rows)
    return found


def adds_positions(gm: fx.GraphModule) -> bool:
    """Whether the last input of a raised graph is ``POSITIONS``."""
    return placeholders(gm.graph)[-1].target == POSITIONS


def positions_of(step: Step) -> torch.Tensor:
    """What ``POSITIONS`` is in a step: (1, T) int64, 0 for padding tokens. By hand it is computed on the device, which a CUDA
    graph that is captured by hand repeats."""
    if step.positions is not None:
        return step.positions[None]
    meta = step.metadata
    place = torch.arange(meta.num_tokens, dtype=torch.int64, device=meta.seq_lens.device)
    row = torch.searchsorted(meta.query_start_loc[1:].long(), place, right=True).clamp_max(len(meta.seq_lens) - 1)
    found = place + (meta.seq_lens - meta.query_start_loc[1:])[row]
    return torch.where(place < meta.query_start_loc[-1], found, 0)[None]


def picks_rows_alone(node: fx.Node, tokens: Any) -> bool:
    """Whether these are numbers of tokens that only pick rows, so that they mean the place in the row."""
    return is_numbering(node, tokens) and not _uses(node)[1]


def is_numbering(node: fx.Node, tokens: Any) -> bool:
    """Whether this is an ``arange`` as long as the row."""
    return node.op == "call_function" and torch_name(node) == "arange" and bool(node.users) and same_shape(
        value(node).shape, (tokens,))


def check_uncompiled(gm: fx.GraphModule) -> None:
    """Raises UnsupportedAttention for a graph that ``use_given_positions`` or ``choose_per_sequence`` had to rewrite, or that
    is the model's path up to some number of tokens only: uncompiled, those of the whole batch would decide."""
    if (shown := longest_shown(gm)) is not None:
        raise UnsupportedAttention(
            f"the model takes a path of its own, or cannot run, for some numbers of tokens ({shown[1]}), so an uncompiled "
            f"paged step of several sequences would be wrong. quire.Engine(model, max_model_len={shown[0]}) and "
            "torch.compile(model, backend='quire') serve sequences up to that length.")
    if gm.meta.get(LIMITS):
        raise UnsupportedAttention(
            "the model chooses its rotary frequencies by the longest sequence of the batch (longrope), so an uncompiled paged "
            "step would be wrong for the others. quire.Engine, quire.paged's generate() and torch.compile(model, "
            "backend='quire') choose them for each sequence.")
    if gm.meta.get(LAST_ALONE):
        raise UnsupportedAttention("the model gives logits of its last token alone, so an uncompiled paged step would give no "
                                   "others. quire.Engine serves it.")
    own = gm.meta.get(_OWN)
    if own:
        raise UnsupportedAttention(
            f"{own[0]} numbers the tokens of the row itself, instead of using position_ids, so an uncompiled paged step "
            "would be wrong for all sequences but the first. quire.Engine and quire.paged's generate() compile the model, and "
            "serve it.")


def _added(graph: fx.Graph, tokens: Any, device: torch.device) -> fx.Node:
    """The input ``POSITIONS``, on the device of the token ids; ``device``: where the graph has none."""
    row = next((value(n) for n in placeholders(graph) if _is_row(n, tokens)), None)
    mode = fake_mode(graph)
    assert mode is not None
    with mode, enable_python_dispatcher():
        example = torch.empty((1, tokens), dtype=torch.int64, device=device if row is None else row.device)
    return add_input(graph, POSITIONS, example)


def _check_numbering(node: fx.Node, where: str) -> None:
    """Raises UnsupportedAttention unless this ``arange`` counts 0, 1, 2, ..., and is there to compute with alone."""
    start = argument(node, 0, "start", 0) if len(node.args) > 1 or "end" in node.kwargs else node.kwargs.get("start", 0)
    dtype, why = value(node).dtype, ""
    if _uses(node)[0]:
        why = "and uses the numbers both to compute and to pick rows"
    elif start != 0 or argument(node, 2, "step", 1) != 1:
        why = "other than 0, 1, 2, ..."
    elif dtype not in _EXACT:
        why = f"in {dtype}, which does not hold each of them; count in int64 or float32, and convert then"
    if why:
        raise UnsupportedAttention(
            f"{where} numbers the tokens of the row ({node.format_node()}) {why}; in a ragged row every sequence has positions "
            "of its own. Compute with position_ids instead, or with torch.arange(T), T the number of tokens.")


def _take_positions(graph: fx.Graph, node: fx.Node, given: fx.Node, where: str) -> list[fx.Node]:
    """Put positions in the place of an ``arange``, or of what it becomes where the positions are; returns these."""
    device = value(given).device
    places = [node] if value(node).device == device else list(node.users)
    if any(value(n).device != device or (n is not node and torch_name(n) not in ("to", "cuda")) for n in places):
        raise _elsewhere(node, where, device)
    made = []
    for place in places:
        with graph.inserting_before(place):
            flat = made_like(graph.call_method("reshape", (given, -1)), place)
            if value(flat).dtype != value(place).dtype:
                flat = made_like(graph.call_method("to", (flat, value(place).dtype)), place)
        place.replace_all_uses_with(flat)
        graph.erase_node(place)
        made.append(flat)
    if places != [node]:
        graph.erase_node(node)
    return made


def _take_rows(graph: fx.Graph, node: fx.Node, given: fx.Node, table: fx.Node, dim: int, rest: tuple[Any, ...]) -> None:
    """Put the rows of positions in the place of the first ones. ``table``, ``dim``, ``rest``: of ``_cut_of``."""
    if value(table).device != value(given).device:
        raise _elsewhere(node, module_path(node) or node.name, value(given).device)
    with graph.inserting_before(node):
        flat = made_like(graph.call_method("reshape", (given, -1)), node)
        rows = made_like(graph.call_method("index_select", (table, dim, flat)), node)
        if any(item != slice(None) for item in rest):
            rows = made_like(graph.call_function(operator.getitem, (rows, rest)), node)
    before_rows, shown = value(node), node.format_node()
    node.replace_all_uses_with(rows)
    graph.erase_node(node)
    changed, gone = {rows}, {storage_of(before_rows), None}  # a copy in memory of its own, and so are the views of it
    for n in graph.nodes:
        if not n.op.startswith("call") or changed.isdisjoint(n.all_input_nodes):
            continue
        before = value(n)
        try:
            now = value(compute_value(n))
        except Exception as error:
            raise UnsupportedAttention(
                f"{module_path(node) or node.name} takes the first rows of a table ({shown}), and quire cannot "
                f"follow what is computed of them ({n.name}: {type(error).__name__}). Number the tokens by torch.arange(T), or "
                "let the forward take position_ids and use them.") from error
        views = isinstance(now, torch.Tensor) and any(
            is_tensor(x) and storage_of(value(x)) == storage_of(now) for x in n.all_input_nodes)
        was = storage_of(before) if isinstance(before, torch.Tensor) else None
        if was is not None and was not in gone and not views and sizes_of(before) == sizes_of(now):
            n.meta["example_value"] = before  # memory of its own, which views have
        else:
            changed.add(n)
            gone.add(was)


def _elsewhere(node: fx.Node, where: str, device: torch.device) -> UnsupportedAttention:
    return UnsupportedAttention(
        f"{where} numbers the tokens of the row ({node.format_node()}) on another device than the model's, and the positions "
        f"that take their place are on {device}. Make them there (device=input_ids.device), or the table a buffer of the "
        "module.")


def _cut_of(node: fx.Node, tokens: Any) -> tuple[fx.Node, int, tuple[Any, ...]] | None:
    """Of a node that takes the first T rows of a table: the table, the dimension, and what it takes of these rows, as an index;
    None for any other."""
    name = torch_name(node)
    table: Any = argument(node, 0, "input")
    if name not in ("getitem", "__getitem__", "narrow") or not is_tensor(node) or not is_tensor(table):
        return None
    val = value(table)
    if is_traceable_wrapper_subclass(val) or is_functorch(val) or [str(n) for n in value(node).shape].count(str(tokens)) != 1:
        return None
    if name == "narrow":
        dim, start, length = (argument(node, k, n) for k, n in enumerate(("dim", "start", "length"), 1))
        if type(dim) is not int or start != 0 or not symbolic(value(length)) or str(value(length)) != str(tokens):
            return None
        dim = at = dim % val.dim()
        items: list[Any] = [slice(None)] * (dim + 1)
    else:
        items = items_of(node)
        if not all(i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in items):
            return None
        found = [(dim, at) for at, dim in dims_of(items, val.dim()) if _is_first(items[at], tokens)]
        if len(found) != 1:
            return None
        dim, at = found[0]
    if symbolic(val.shape[dim]):
        return None
    items[at] = slice(None)
    fixed = all(not isinstance(x, fx.Node) for i in items if isinstance(i, slice) for x in (i.start, i.stop, i.step))
    return (table, dim, tuple(items)) if fixed else None


def _is_first(item: Any, tokens: Any) -> bool:
    """Whether an item of an index is ``:T``."""
    return isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1) and symbolic(
        stop := value(item.stop)) and str(stop) == str(tokens)


def _tables_of(graph: fx.Graph, flat: list[fx.Node]) -> Iterator[tuple[str, int, bool]]:
    """Of each table of a fixed size that positions, or whole numbers computed from them, pick rows of: where that is, for
    how many positions from 0 on there is a row, if not for all that are tried, and whether that is known. For numbers of which
    more is computed than a formula of one position it is not: as many as it has rows."""
    numbers: dict[fx.Node, torch.Tensor | None] = dict.fromkeys(flat, torch.arange(_MANY))  # None: not known
    for node in graph.nodes if flat else ():
        for index, size, wraps in _lookups(node):
            if isinstance(index, fx.Node) and index in numbers and not symbolic(size):
                if (found := numbers[index]) is None:
                    yield module_path(node) or node.name, int(size), False
                elif bool((outside := (found >= size) | (found < (-size if wraps else 0))).any()):
                    yield module_path(node) or node.name, int(outside.int().argmax()), True
        if node not in numbers and is_tensor(node) and any(index in numbers for index in node.all_input_nodes):
            if (made := _numbers_of(node, numbers)) is not None:
                numbers[node] = made[0]


def _numbers_of(node: fx.Node, numbers: Mapping[fx.Node, torch.Tensor | None]) -> tuple[torch.Tensor | None] | None:
    """What a node makes of ``numbers`` of tokens: (numbers,), (None,) if they are others that are not known; None if it makes
    no numbers of tokens: a comparison, rows of a table, what the model computes with its weights."""
    name, dtype = torch_name(node), value(node).dtype
    tensors = [x for x in node.all_input_nodes if is_tensor(x)]
    if dtype == torch.bool or any(isinstance(index, fx.Node) and index in numbers for index, *_ in _lookups(node)) \
            or any(value(x).is_floating_point() and x not in numbers for x in tensors) \
            or dtype.is_floating_point and not all(x in numbers for x in tensors):
        return None
    first: Any = argument(node, 0, "input", argument(node, 0, "tensors"))
    if isinstance(first, (list, tuple)) and len(first) == 1:  # a stack of one
        first = first[0]
    known = numbers.get(first) if isinstance(first, fx.Node) else None
    whole = name == "getitem" and all(i is None or i is Ellipsis or i == slice(None) for i in items_of(node))
    if known is not None and dtype in _EXACT and (name in _PASSED_ON or whole):
        return (known.to(dtype),)
    plain = all(isinstance(x, (int, float, str, fx.Node, type(None))) for x in (*node.args, *node.kwargs.values()))
    if name in _FORMULA and dtype in _EXACT and plain and len(node.all_input_nodes) == 1 and (
            known := numbers[node.all_input_nodes[0]]) is not None:
        env = {node.all_input_nodes[0]: known}
        evaluate([node], env)
        return (env[node],)
    return (None,)


def _lookups(node: fx.Node) -> Iterator[tuple[Any, Any, bool]]:
    """(index, size of the dimension, whether negative numbers count from its end) of what a node looks up."""
    name = torch_name(node) or target_name(node)
    data: Any = argument(node, 0, "input")
    if node.target is torch.embedding and len(node.args) > 1:  # its arguments are in the other order
        yield node.args[1], value(node.args[0]).shape[0], False
    elif name == "embedding" and is_tensor(weight := argument(node, 1, "weight")):
        yield data, value(weight).shape[0], False
    elif name == "one_hot" and type(classes := argument(node, 1, "num_classes", -1)) is int and classes > 0:
        yield data, classes, False
    elif name == "take" and is_tensor(data):
        yield argument(node, 1, "index"), value(data).numel(), True
    elif name in ("index_select", "gather") and is_tensor(data):
        dim, index = argument(node, 1, "dim"), argument(node, 2, "index")
        if type(dim) is int:
            yield index, value(data).shape[dim], False
    elif name == "getitem" and is_tensor(data):
        shape, items = value(data).shape, items_of(node)
        for at, dim in dims_of(items, len(shape)):
            yield items[at], shape[dim], True


def _is_row(node: fx.Node, tokens: Any) -> bool:
    x = value(node)
    return isinstance(x, torch.Tensor) and not x.is_floating_point() and (
        same_shape(x.shape, (tokens,)) or same_shape(x.shape, (1, tokens)))


def _uses(node: fx.Node) -> tuple[bool, bool]:
    """Whether the numbers, or whole numbers computed from them, pick rows; and whether anything is computed from them."""
    picks = counts = False
    todo, seen = [node], set()
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        for user in n.users:
            name = target_name(user)
            data = argument(user, 0, "input")
            if name in ("setitem", "index_put_") and isinstance(data, fx.Node):
                if data is n:
                    continue
                if not _indexes(user, name, n):  # written into a tensor: an inverse permutation, say
                    todo.append(data)
                    continue
            indexing = name in ("getitem", "setitem", "index_put", "index_put_", *_PICKING)
            if indexing and data is not n and _indexes(user, name, n):
                if _picks_rows(user, name, n):
                    picks = True
                else:
                    counts = True  # looks a table up
                continue
            adds_zero = name in ("add", "sub") and any(isinstance(a, int) and a == 0 for a in user.args)
            if not (name == "getitem" or name in _PASSED_ON or adds_zero):
                counts = True
            result = value(user)
            of_numbers = all(x in seen for x in user.all_input_nodes if isinstance(value(x), torch.Tensor))  # and constants
            if isinstance(result, torch.Tensor) and (not result.is_floating_point() or of_numbers):
                todo.append(user)
    return picks, counts


def _indexes(user: fx.Node, name: str, index: fx.Node) -> bool:
    """Whether ``index`` is among the indices of ``user``, and not its data."""
    at = _PICKING[name][1] if name in _PICKING else 1
    given = user.args[at] if len(user.args) > at else user.kwargs.get("indices" if name.startswith("index_put") else "index")
    return index in (given if isinstance(given, (tuple, list)) else (given,))


def _picks_rows(user: fx.Node, name: str, index: fx.Node) -> bool:
    """Whether ``user`` indexes a dimension as long as the row, or a multiple of it; a table's has a fixed size."""
    shape = value(argument(user, 0, "input")).shape
    if name in _PICKING:
        dim = argument(user, _PICKING[name][0], "dim")
        return symbolic(shape[dim]) if isinstance(dim, int) else True
    return any(items[at] is index and symbolic(shape[dim]) for items in [items_of(user)] for at, dim in dims_of(
        items, len(shape)))

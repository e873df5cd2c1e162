"""The attention sites of a traced model, checked against its config, and the configs and heads that quire cannot serve."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from quire.attn_ops.attention import AttentionSite, Latent, attention
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.mla import mla_attention
from quire.attn_ops.registry import aligned
from quire.passes.fx import ancestors, argument, constant, module_path, placeholders, source_name, symbolic, value
from quire.passes.rewrite.length_rope import ropes_of
from quire.passes.rewrite.own_positions import POSITIONS, picks_rows_alone
from quire.passes.rewrite.raise_sdpa import find_sdpa
from quire.passes.verify.unseen import unseen

#: Layer types of a transformers config that keep no state beside keys and values.
STATELESS_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
#: Those that attend to some of the keys, which they choose by content.
_SPARSE = re.compile(r"index|sparse|compress")
#: Those that keep state beside keys and values.
_STATE = re.compile(r"linear|conv|mamba|ssm|recurrent|rwkv|delta|hybrid")
#: Of a forward that draws by Python's generators, or NumPy's.
DRAWS = ("the model's forward draws random numbers in Python (random, numpy.random), so that its result is another one in each "
         "call; let it draw only in training (if self.training)")
#: Classes of checkpoints without the weights of a language-model head. ``GPT2LMHeadModel`` has them.
_HEADLESS = re.compile(r".*(For(Token|Sequence)Classification|ForQuestionAnswering|ForMultipleChoice|RewardModel"
                       r"|(?<!Head)(?<!Heads)Model)")


def site_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of the semantic ops, in graph order."""
    ops = (attention, torch.ops.quire.attention, mla_attention)
    return [n for n in graph.nodes if n.op == "call_function" and n.target in ops]


def site_of(node: fx.Node) -> AttentionSite:
    """The static facts of one node of a semantic op."""
    path, route = module_path(node), node.meta.get("quire_route")
    try:
        options = {name: constant(option) for name, option in node.kwargs.items()}
    except ValueError as error:
        raise UnsupportedAttention(f"the attention call at {path or node.name} has an option that is not constant: {error}; "
                                   "compile with fixed options, e.g. after torch._dynamo.reset()") from error
    if not 0 < options.get("scale", 1.0) < math.inf:
        raise UnsupportedAttention(f"the attention call at {path or node.name} has scale {options['scale']}; quire serves "
                                   "positive ones: multiply the query by another number before the call")
    if node.target is mla_attention:
        q, c, k_rope, kv_b = map(value, node.args)
        heads, dim, latent = int(q.shape[1]), int(q.shape[3]), Latent(int(c.shape[2]), int(k_rope.shape[2]))
        return AttentionSite(
            **options, num_heads=heads, num_kv_heads=heads, head_dim=dim, dtype=q.dtype, name=path, route=route or "interface",
            head_dim_v=int(kv_b.shape[0]) // heads - dim + latent.rope, latent=latent)
    q, k, v = map(value, node.args[:3])
    return AttentionSite(
        **options, num_heads=int(q.shape[1]), num_kv_heads=int(k.shape[1]), head_dim=int(q.shape[3]), dtype=q.dtype, name=path,
        head_dim_v=int(v.shape[3]), sinks=node.args[3] is not None, route=route or ("interface" if path else "op"))


def verify(graph: fx.Graph, sites: Sequence[AttentionSite], config: Any, refusals: dict[str, str]) -> None:
    """Refuse a traced model whose attention is not wholly in ``sites``. ``config``: of transformers, or None. ``refusals``:
    from the raising pass, by module path. Raises UnsupportedAttention: which layer, what was expected, and what was found."""
    if any(re.match(r"random_value_\d", source_name(n)) for n in placeholders(graph)):
        raise UnsupportedAttention(DRAWS)
    left = find_sdpa(graph)
    if left or refusals:
        lines = [f"\n  {where}: {why}" for where, why in refusals.items()] or [f"\n  {module_path(n)}" for n in left]
        raise UnsupportedAttention("some scaled_dot_product_attention calls cannot be paged:" + "".join(lines))
    layers = [s.layer for s in sites]
    doubled = sorted({n for n in layers if layers.count(n) > 1})
    if doubled:
        raise UnsupportedAttention(f"layers {doubled} attend more than once in one forward; quire keeps one KV cache a layer")
    if config is None:
        if not sites:
            raise UnsupportedAttention(f"no attention was found: {unseen(graph)}")
        return
    _verify_config(graph, sites, config)


def check_positions(graph: fx.Graph, tokens: Any, has_config: bool) -> None:
    """Refuse a model that counts positions itself in a way that ``own_positions.py`` does not take up, which is wrong for all
    sequences of a ragged row but the first, or whose positions do not begin at 0. ``graph``: after that. ``has_config``: of
    transformers. Raises UnsupportedAttention if the graph makes something as long as the row out of nothing, but to pick rows,
    or looks given positions up in a table with an entry for padding."""

    def long_as_row(n: Any) -> bool:
        val = value(n)
        return isinstance(val, torch.Tensor) and any(str(s) == str(tokens) for s in val.shape)

    ids = [n for n in placeholders(graph) if n.users and long_as_row(n) and not value(n).is_floating_point()]
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "embedding" and isinstance(
                argument(node, 2, "padding_idx"), int):
            leaves = {n for n in ancestors(argument(node, 0, "input"))
                      if n.op == "placeholder" and isinstance(value(n), torch.Tensor)}
            if leaves and all("pos" in source_name(n) and n.target != POSITIONS for n in leaves):  # RoBERTa and its kin
                raise UnsupportedAttention(
                    f"the positions at {module_path(node) or node.name} are looked up in a table with an entry for padding, so "
                    "that the model's own count begins behind it and not at 0, where quire's positions begin.")
    reads = len(ids) > 1 or any("pos" in source_name(n) for n in ids)
    if (reads and has_config) or not symbolic(tokens):  # a transformers model that reads positions may also number tokens
        return
    if tokens.node.expr.is_number:  # no longer any number: check_tokens says what made it one
        return
    for node in graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        data: Any = argument(node, 0, "input")
        cut = name in ("getitem", "narrow") and isinstance(value(data), torch.Tensor) and not any(
            map(long_as_row, ancestors(data)))  # of a stored table
        made = (cut or name in ("arange", "linspace")) and not any(long_as_row(n) for n in node.all_input_nodes)
        if node.op.startswith("call") and node.users and long_as_row(node) and made and not picks_rows_alone(node, tokens):
            raise UnsupportedAttention(
                f"the model makes positions of its own ({name} at {module_path(node) or node.name}: {node.format_node()}); in "
                "a ragged batch every sequence has its own. quire puts them in place of torch.arange(T), T the number of "
                "tokens, and of table[:T] of a parameter or buffer. Write it so, or let the forward take position_ids and use "
                "them.")


def check_rope(config: Any) -> None:
    """Raises UnsupportedAttention for a config with rope_type "dynamic", in it or nested in it: frequencies by the longest
    sequence of the batch change with every token, so that all keys would have to be computed again."""
    kind = getattr(config, "model_type", type(config).__name__)
    for rope, _ in ropes_of(config):
        name = rope.get("rope_type") or rope.get("type")
        if name == "dynamic":
            raise UnsupportedAttention(f"{kind} has rope_type 'dynamic', whose frequencies depend on the longest sequence of "
                                       "the batch; set another rope_type (yarn, linear, llama3) to serve it.")


def check_model(model: torch.nn.Module) -> None:
    """``check_rope`` of every config that a module of ``model`` holds, and that parameters are whole. Raises
    UnsupportedAttention."""
    shards = next((name for name, p in model.named_parameters() if type(p).__name__ == "DTensor"), None)
    if shards is not None:
        raise UnsupportedAttention(f"{shards} is a DTensor, a shard of a parameter (FSDP2's fully_shard, tensor parallelism): "
                                   "an engine needs whole parameters on one device")
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}
    for config in configs.values():
        check_rope(config)


def check_config(config: Any) -> None:
    """The checks that need a transformers config only, before any tracing. Raises UnsupportedAttention."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedAttention(f"{kind} is an encoder-decoder model; quire serves decoder-only models.")
    text = text_config(config)
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    other = sorted(set(types) - STATELESS_LAYERS - {"attention", "full"})
    if other:
        sparse = list(filter(_SPARSE.search, other))
        state = [t for t in other if t not in sparse and _STATE.search(t)]
        unknown = [t for t in other if t not in sparse and t not in state]
        raise UnsupportedAttention("; ".join([
            *([f"{kind} has layers of type {state}: they keep state that is not keys and values (SSM, convolution, linear "
               "attention), which a packed batch would leak between sequences"] if state else []),
            *([f"{kind} has layers of type {sparse}: each token chooses by their content the keys that it attends to (sparse "
               "or indexed attention), and no backend of quire does"] if sparse else []),
            *([f"{kind} has layers of type {unknown}, of which quire does not know what they compute"] if unknown else []),
        ]) + f". quire serves {sorted(STATELESS_LAYERS)}.")
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):  # "vision": among tokens of images
        raise UnsupportedAttention(f"{kind} is configured with use_bidirectional_attention="
                                   f"{text.use_bidirectional_attention!r}; quire serves causal models.")
    check_rope(config)


def text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if get is not None else config


def transformers_config(model: torch.nn.Module) -> Any:
    """The config of a model of transformers; None if it has none: a user's module may have anything under that name."""
    config = getattr(model, "config", None)
    return config if any(cls.__module__.startswith("transformers.") for cls in type(config).__mro__) else None


def check_checkpoint(model: torch.nn.Module) -> None:
    """Raises UnsupportedAttention for a model loaded from a checkpoint of another kind: its head has random weights."""
    config: Any = getattr(model, "config", None)
    names = getattr(config, "architectures", None) or []
    loaded = bool(getattr(config, "_name_or_path", "")) and not getattr(config, "tie_word_embeddings", False)
    if loaded and names and type(model).__name__ not in names and all(map(_HEADLESS.fullmatch, names)):
        raise UnsupportedAttention(f"the checkpoint {config._name_or_path} is of {', '.join(names)}, without the weights of a "
                                   f"language-model head: that of this {type(model).__name__} is random.")


def check_logits(model: torch.nn.Module, width: int) -> None:
    """Raises UnsupportedAttention for a transformers model whose logits, ``width`` per token, are not over its vocabulary."""
    head, embedding = (getattr(model, name, lambda: None)() for name in ("get_output_embeddings", "get_input_embeddings"))
    rows = getattr(getattr(embedding, "weight", None), "shape", [None])[0]
    if rows is None and (config := transformers_config(model)) is not None:  # a module of the user's around a model
        rows = getattr(text_config(config), "vocab_size", None)
    if transformers_config(model) is not None and head is None and rows is not None and width != rows:
        raise UnsupportedAttention(f"{type(model).__name__} has no language-model head: it gives {width} logits per token, and "
                                   f"its vocabulary has {rows} tokens.")
    if rows is not None and width > rows:
        raise UnsupportedAttention(f"{type(model).__name__} gives {width} logits per token, and its embedding has {rows} rows: "
                                   f"a token of {rows} or more could be sampled, and not be read. Make the two equal: "
                                   "model.resize_token_embeddings(n).")


def _layers_run(graph: fx.Graph, sites: Sequence[AttentionSite]) -> tuple[str, int] | None:
    """The list of layers that every site is in, such as ``model.layers``, and how many of its layers run; None: unknown."""
    lists = {match[1] for site in sites if (match := re.match(r"(.*?)\.\d+(\.|$)", site.name))}
    if len(lists) != 1:
        return None
    (name,) = lists
    return name, len({m[1] for n in graph.nodes if (m := re.match(rf"{re.escape(name)}\.(\d+)(\.|$)", module_path(n)))})


def _verify_config(graph: fx.Graph, sites: Sequence[AttentionSite], config: Any) -> None:
    kind = getattr(config, "model_type", type(config).__name__)
    text = text_config(config)
    expected = getattr(text, "num_hidden_layers", None)
    if expected is not None and len(sites) != expected:
        found = f"{kind} has {expected} layers but {len(sites)} attention sites were found. "
        layers = _layers_run(graph, sites)
        if layers is not None and layers[1] == len(sites) < expected:
            raise UnsupportedAttention(
                f"{found}Of {layers[0]} only {len(sites)} ran, and each attends, so it is the config's num_hidden_layers that "
                f"does not fit. If layers were removed, set model.config.num_hidden_layers = {len(sites)}.")
        if getattr(config, "_attn_implementation", None) == "eager" and _has_sdpa(config):
            raise UnsupportedAttention(
                f"{found}Under attn_implementation='eager' this class writes its attention out by hand; with its default it "
                "may be served: model.set_attn_implementation('sdpa'), or load it without attn_implementation.")
        raise UnsupportedAttention(
            f"{found}The rest either attends in a way that quire does not see (neither by transformers' attention interface "
            "nor F.scaled_dot_product_attention, nor written out as softmax(q @ k.mT * scale + mask) @ v) or is not attention "
            "(SSM, convolution, linear attention); or, if layers were added or removed, the config does not say so.")
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap and any(s.softcap is None for s in sites):
        raise UnsupportedAttention(f"{kind} is configured with attn_logit_softcapping={cap}, but this version of transformers "
                                   "does not hand it to the attention call; update transformers.")
    types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if window and not types and (without := [s for s in sites if s.window is None]):
        raise UnsupportedAttention(
            f"{kind} is configured with sliding_window={window}, but attends without it at layer {without[0].layer} "
            f"({without[0].name}), so its result depends on the cache that it is given. If no window is meant, set "
            "config.sliding_window to None.")
    kinds = dict(enumerate(types or ()))
    for place, s in enumerate(sites):
        kind_of = kinds.get(s.layer)
        if s.route == "interface" and len({*kinds.values()}) > 1 and kinds.get(place) != kind_of:
            # Most models take a layer's mask by its place, and everything else by its number.
            raise UnsupportedAttention(
                f"layer {s.layer} ({s.name}) runs in the place of layer {place}, for which transformers makes the mask of "
                f"{kinds.get(place)}; layer {s.layer} is {kinds.get(s.layer, 'none')} by the config. If layers were removed or "
                "moved, make config.layer_types, and layer_idx of each layer's attention, agree with their order.")
        if kind_of == "sliding_attention" and s.window is None:
            raise UnsupportedAttention(f"layer {s.layer} ({s.name}) is a sliding_attention layer, but its window did not "
                                       "reach the attention call")
        of_mask = window if kind_of == "sliding_attention" or not types else None  # transformers makes the mask by the config
        if s.route == "interface" and s.window is not None and s.window != of_mask and not isinstance(of_mask, (list, tuple)):
            raise UnsupportedAttention(f"layer {s.layer} ({s.name}) attends with window {s.window}, and transformers makes its "
                                       f"mask by the config's sliding_window={of_mask}; make both equal")
        if kind_of == "chunked_attention" and s.chunk is None:
            raise UnsupportedAttention(f"layer {s.layer} ({s.name}) is a chunked_attention layer, but attends without chunks")
    for s, kept in zip(sites, _kept(text, sites), strict=True):
        if kept is not None and kept != (s.window or s.chunk):
            raise UnsupportedAttention(
                f"the cache that generate() makes for {kind} keeps the last {kept} tokens of layer {s.layer} ({s.name}), which "
                f"attends to {s.window or s.chunk or 'all'}, so its result depends on the cache that it is given. Make the "
                "config's fields agree: sliding_window, attention_chunk_size, layer_types, per_layer_config (None where no "
                "window is meant).")


def _kept(config: Any, sites: Sequence[AttentionSite]) -> list[int | None]:
    """How many tokens of each site's layer the cache keeps that ``generate`` makes by the config; None: all. Raises
    UnsupportedAttention if it makes none."""
    from transformers import DynamicCache

    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:
        raise UnsupportedAttention("transformers makes no cache by this config, so it is not known what generate() would keep: "
                                   f"{type(error).__name__}: {error}") from error
    return [getattr(layers[s.layer], "sliding_window", None) if s.layer < len(layers) else None for s in sites]


def _has_sdpa(config: Any) -> bool:
    """Whether transformers' causal LM of this config has an implementation by F.scaled_dot_product_attention."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and bool(
        getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False))


def format_sites(sites: Sequence[AttentionSite]) -> str:
    """A plain table, one row a site, which snapshots compare."""
    rows = [[str(s.layer), s.name or "-", s.route, s.needs(), f"{s.scale:.6g}"] for s in sites]
    return "\n".join(aligned([["layer", "module", "route", "needs", "scale"], *rows]))

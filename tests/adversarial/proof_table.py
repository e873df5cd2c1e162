"""Writes ``docs/proof.md``: what quire promises never to serve wrongly, case by case, and the test that shows each.

    python -m tests.adversarial.proof_table
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROUTES = ("engine", "decorator", "compile")
PAGE = Path(__file__).parents[2] / "docs" / "proof.md"


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        case: what a model or a user does.
        outcome: what happens on every route.
        tests: ids of tests without ``tests/`` and ``.py``; ``-*`` stands for each of ROUTES.
    """

    case: str
    outcome: str
    tests: tuple[str, ...]


def _masks(*names: str, outcome: str = "refused") -> tuple[str, ...]:
    return tuple(f"adversarial/test_masks::test_{outcome}[{name}-*]" for name in names)


def _mixers(*names: str) -> tuple[str, ...]:
    return tuple(f"adversarial/test_mixers::test_mixing_is_refused[{name}-*]" for name in names)


_UNCOMPILED = "adversarial/test_mixers::test_uncompiled_mixers"
SECTIONS = {
    "Masks": [
        Row("depends on token ids: compared, looked up in a table, hashed", "refused", _masks(
            "ids above 40", "kinds by id", "hash of ids")),
        Row("attention written out: with such masks; with others, biases, weights that are read again", "exact; refused", (
            "passes/rewrite/test_raise_written::test_served", "passes/rewrite/test_raise_written::test_refused",
            "passes/rewrite/test_raise_written::test_changes_in_place_between_are_refused")),
        Row("what a mask hides is shown again by another; keys picked by number behind a repeat", "refused", (
            "passes/rewrite/test_raise_written::test_refused",
            "passes/rewrite/test_raise_sdpa::test_keys_picked_by_number_behind_a_repeat")),
        Row("its products as `einsum`: of two matrices; with other sums", "exact; refused", (
            "passes/rewrite/test_einsum_products::test_served", "passes/rewrite/test_einsum_products::test_refused")),
        Row("its softmax written out, or made safe from NaN: the stable one; without the maximum, rows without a key",
            "exact; refused", (
                "passes/rewrite/test_written_softmax::test_served", "passes/rewrite/test_written_softmax::test_refused",
                "passes/rewrite/test_written_softmax::test_rows_without_a_key_are_refused")),
        Row("`nn.MultiheadAttention`, `nn.TransformerEncoderLayer`: with such masks; with others, weights read, keys added",
            "exact; refused", (
                "passes/rewrite/test_multihead::test_attention_is_served",
                "passes/rewrite/test_multihead::test_layers_are_served", "passes/rewrite/test_multihead::test_refused")),
        Row("its scores scaled and masked in place; where another name of the memory is read", "exact; refused", (
            "passes/rewrite/test_in_place_scores::test_served", "passes/rewrite/test_in_place_scores::test_refused")),
        Row("numbers that are rounded on the way, arguments by name", "never wrong", (
            "passes/rewrite/test_raise_sdpa::test_masks_that_are_easily_misread",)),
        Row("a transformers model that makes a mask of its own: causal, all ones; others; one of transformers' that it changes",
            "exact; refused", (
                "passes/capture/test_own_masks::test_masks_that_hide_nothing_more_are_proven",
                "passes/capture/test_own_masks::test_masks_that_hide_more_or_less_are_refused",
                "passes/capture/test_own_masks::test_changed_masks_are_not_taken_from_the_trace")),
        Row("a layer changes the mask that transformers made; a module has a window that it has not", "refused", (
            "passes/capture/test_own_masks::test_layers_masks_that_would_be_lost",
            "passes/capture/test_own_masks::test_a_window_that_the_mask_has_not")),
        Row("layers removed or moved in a model with two kinds: places of another kind; of their own", "refused; exact", (
            "passes/capture/test_paged_model::test_layers_that_run_in_places_of_another_kind_are_refused",
            "passes/capture/test_paged_model::test_layers_that_were_removed_with_their_types_are_served")),
        Row("a window in a buffer of 0 to 3 dimensions", "exact", _masks(
            "window, 0-d buffer", "window, 2-d buffer", "window, 3-d buffer", outcome="exact")),
        Row("a window per head: other ones; all the same", "refused; exact", (
            *_masks("window per head"), *_masks("window per head, all the same", outcome="exact"))),
        Row("a 1-D table by `position_ids`: hides positions; numbers chunks", "refused; exact", (
            *_masks("positions hidden by a table"), *_masks("chunk, 1-d table of positions", outcome="exact"))),
        Row("numbers far out, in one head or one cell of a stored mask", "refused", _masks(
            "prefix far out", "one head another window", "stored triangle with a hole", "stored, one head with a hole")),
        Row("bits of floats, an index that is a truth, writes by ops of others", "refused", (
            "passes/verify/test_masks::test_refused[the bits of a float]",
            "passes/verify/test_masks::test_refused[indexed by a truth]",
            "passes/verify/test_masks::test_refused[written by an operation of a library]")),
        Row("random masks", "never wrong", ("adversarial/test_masks::test_many_random_masks",)),
        Row("an uncompiled forward with a mask of its own", "refused", (
            "passes/capture/test_own_masks::test_masks_that_would_be_lost",
            "passes/capture/test_retrace::test_kinds_of_tokens_are_refused_in_an_uncompiled_step")),
    ],
    "Tokens meet in attention and nowhere else": [
        Row("linear attention, `einsum`, `bmm`, `baddbmm` over tokens", "refused", (*_mixers(
            "linear attention", "einsum over T", "bmm over T", "baddbmm"), _UNCOMPILED)),
        Row("group and instance norm, `normalize(dim=1)`, pooling, `vector_norm`", "refused", (*_mixers(
            "group norm", "instance norm", "normalize over T", "average pool", "vector_norm over T"), _UNCOMPILED)),
        Row("`x[..., 0, :]`, `select`, `index_select`, `narrow`", "refused", (*_mixers(
            "first row", "select over T", "index_select over T", "narrow over T"), _UNCOMPILED)),
        Row("`topk`, `kthvalue`, `quantile`, `any`, `count_nonzero`", "refused", (*_mixers(
            "topk over T", "kthvalue over T", "quantile over T", "any over T", "count_nonzero over T"), _UNCOMPILED)),
        Row("integer `sum`, `argsort`, `amin`; `bincount`", "refused", (*_mixers(
            "integer sum", "integer argsort", "integer amin", "bincount"), _UNCOMPILED)),
        Row("numbers of rows, ids and zeros that are written over, also through views; pooling's indices", "refused", (
            "passes/verify/test_written::test_refused",
            "passes/verify/test_tokens::test_refused_for_what_it_does[places of the largest]")),
        Row("writes in spellings of their own: shifts, `out=` of two tensors, what no table knows", "refused", (
            "passes/verify/test_written::test_refused", "passes/verify/test_written::test_writes_that_no_table_knows",
            "passes/test_fx::test_what_writes_is_not_pure")),
        Row("`position_ids`, or numbers that a model makes itself, changed in place", "refused", (
            "passes/rewrite/test_own_positions::test_refused",
            "passes/rewrite/test_own_positions::test_given_positions_that_are_changed_are_not_those_of_others")),
        Row("tokens numbered by the model, by `arange` or the first rows of a table; in other ways", "exact; refused", (
            "adversarial/test_counting::test_served", "adversarial/test_counting::test_refused")),
        Row("a sequence longer than a table that positions pick rows of", "refused", (
            "adversarial/test_counting::test_a_sequence_is_no_longer_than_the_table",
            "adversarial/test_counting::test_positions_that_are_given_end_with_the_table_too",
            "adversarial/test_counting::test_a_step_by_hand_is_no_longer_than_the_table")),
        Row("logits of the last token alone: engine; by hand; of another token", "exact; refused; refused", (
            "adversarial/test_counting::test_logits_of_the_last_token_are_those_of_each_wanted_one",
            "adversarial/test_counting::test_the_last_logits_by_hand_are_refused",
            "adversarial/test_counting::test_other_single_logits_are_refused")),
        Row("the last row by a slice of what is changed in place then; changes of a view of one row alone", "refused", (
            "passes/rewrite/test_last_alone::test_a_slice_of_what_is_changed_then_is_refused",
            "passes/rewrite/test_last_alone::test_what_is_a_view_of_one_row_alone_is_refused")),
        Row("rare events", "refused", (
            *_mixers("rare gate", "rare any"), "adversarial/test_mixers::test_uncompiled[rare event]",
            "graph_runner/test_packing_check::test_what_kind[rarer]")),
        Row("a branch below the trial's rounding", "refused", ("graph_runner/test_packing_check::test_leaks_below_rounding",)),
        Row("unknown operators, functions that Dynamo does not look into, NumPy, `torch.func`", "refused", (
            *_mixers("an op that is named clone", "an op that writes", "hidden from the tracer"),
            "adversarial/test_practice::test_mixing_is_refused[counted by a function of the graph-decorator]",
            "adversarial/test_practice::test_mixing_is_refused[counted in NumPy-engine]",
            "passes/verify/test_tokens::test_refused_for_what_it_does[a derivative]")),
        Row("`torch.vmap`, checkpoints, bilinear layers, norms and sorts within a token", "exact", (
            "adversarial/test_practice::test_harmless_is_served[vmap over heads-decorator]",
            "adversarial/test_practice::test_harmless_is_served[checkpoint in a checkpoint-engine]",
            "adversarial/test_practice::test_harmless_is_served[bilinear-decorator]")),
        Row("the longest position of a batch (dynamic NTK), also of wrapped models", "refused", (
            *_mixers("longest position"), "adversarial/test_positions::test_every_config_in_the_module_tree_is_checked")),
        Row("a path of its own from 3 tokens or more on, and a stored mask's end: below; beyond", "exact; refused", (
            "passes/verify/test_lengths::test_an_engine_serves_up_to_that_length",
            "passes/verify/test_lengths::test_a_longer_step_by_hand_is_refused",
            "passes/verify/test_lengths::test_uncompiled_steps_are_refused")),
        Row("code of a user's that does something else with a KV cache, in ways that reading does not show", "refused by the "
            "trial", ("graph_runner/test_own_cache::test_what_differs_with_a_cache_is_refused",)),
        Row("`generate` in training mode, in which code of a user's does something else", "falls back, by reading or a trial", (
            "graph_runner/test_own_forward::test_training_mode_that_changes_something",
            "graph_runner/test_own_training::test_what_differs_in_training_mode",
            "graph_runner/test_own_training::test_generate_in_training_mode")),
        Row("a path of its own for one token", "refused by the trial", (
            "graph_runner/test_packing_check::test_another_path_for_one_token",)),
        Row("a window that a layer makes only where it gets a mask, as it does in a trace", "refused by the trial", (
            "graph_runner/test_packing_check::test_a_window_that_is_there_only_in_a_trace",)),
        Row("a kept trace of code that asks what no guard is on: whether two objects are one, what names an object has, what "
            "is registered with an abstract class, in what order a set is", "another answer is traced", (
                "passes/capture/test_unguarded::test_another_answer_is_traced",
                "passes/capture/test_unguarded::test_another_rank_is_traced")),
        Row("a trace that rests on code which Dynamo runs and does not look into: of a metaclass, a substitute, the state of "
            "Python", "not kept", (
                "passes/capture/test_unguarded::test_code_that_dynamo_does_not_look_into_is_not_kept",
                "passes/capture/test_unguarded::test_a_trace_of_unknown_code_is_not_kept",
                "passes/capture/test_not_kept::test_a_result_that_dynamo_takes_for_a_constant_is_not_kept")),
        Row("a verdict on a kept trace: another graph, other weights, another forward", "found out again", (
            "passes/capture/test_kept_verdicts::test_any_difference_is_proved",
            "graph_runner/test_kept_trial::test_the_same_model_has_one_trial",
            "graph_runner/test_kept_trial::test_a_forward_that_computes_something_else_is_found",
            "passes/capture/test_kept_verdicts::test_a_graph_that_is_refused_is_refused_again")),
        Row("longrope into a buffer of another dtype; by another sum", "exact; refused", (
            "passes/rewrite/test_length_rope::test_the_frequencies_are_those_of_the_buffer",
            "passes/rewrite/test_length_rope::test_other_choices_stay")),
        Row("longrope: engine; by hand; uncompiled", "exact; exact; refused", (
            "adversarial/test_positions::test_longrope_on_the_engine", "adversarial/test_positions::test_longrope_by_hand",
            "adversarial/test_positions::test_longrope_uncompiled_is_refused")),
        Row("random modules", "never wrong", ("adversarial/test_mixers::test_many_random_modules",)),
    ],
    "What the user chose": [
        Row("an attention or mask function of the user's", "refused", (
            "passes/capture/test_hf_interface::test_functions_of_the_users_are_refused",
            "graph_runner/test_users_code::test_attention_functions_that_would_be_replaced")),
        Row("`set_attn_implementation` on an open engine", "traced again, or refused", (
            "graph_runner/test_model_guard::test_another_attention_implementation",)),
        Row("a class's own `generate`, `_get_logits_processor`, `prepare_inputs_for_generation`", "its own path", (
            "graph_runner/test_paged::test_methods_of_the_models_own_count",
            "graph_runner/test_users_code::test_generate_falls_back")),
        Row("hooks: that record; that change outputs", "refused; exact", (
            "passes/capture/test_paged_model::test_hooks_that_record_are_refused",
            "passes/capture/test_paged_model::test_hooks_that_change_outputs_are_not_refused")),
        Row("hooks and forwards that treat rows of a batch differently (a trial of three rows), or give several for one",
            "refused", ("graph_runner/test_own_cache::test_what_treats_rows_differently_is_refused",
                        "graph_runner/test_own_cache::test_a_forward_that_treats_rows_differently_is_refused")),
        Row("a logits processor that uses the engine in whose step it runs", "refused", (
            "graph_runner/test_calls_in_steps::test_it_is_refused_and_others_get_their_tokens",)),
        Row("models and checkpoints without a language-model head", "refused", (
            "passes/capture/test_paged_model::test_models_without_a_head",
            "passes/capture/test_paged_model::test_checkpoints_without_a_head")),
        Row("refusals say what is wrong", "", (
            "passes/capture/test_paged_model::test_refusals_of_forwards_say_what_is_wrong",
            "passes/capture/test_paged_model::test_eager_attention_written_by_hand_names_the_way_out",
            "graph_runner/test_users_code::test_reasons")),
        Row("steps of one token by hand", "exact", ("passes/test_step::test_steps_of_one_token",
                                                    "zoo/test_zoo::test_greedy_by_hand")),
        Row("attention that the user's code chooses by the implementation's name", "exact; refused", (
            "passes/capture/test_own_attention::test_engine", "passes/capture/test_own_attention::test_steps_by_hand",
            "passes/capture/test_own_attention::test_what_cannot_be_paged_is_refused")),
        Row("a layer's window or chunk without a mask of it; a cache that keeps less than a layer sees", "refused", (
            "passes/capture/test_own_attention::test_a_window_without_its_mask",
            "passes/capture/test_own_attention::test_chunks_of_a_class_without_them")),
        Row("encoders whose masks have a meaning, in `encoder_attention`", "refused", (
            "passes/capture/test_encoder_attention::test_masks_with_a_meaning",)),
        Row("steps by the interface of a layer that uses eager attention's weights", "refused", (
            "passes/capture/test_retrace::test_attention_weights_that_a_layer_uses_are_not_dropped",)),
        Row("uncompiled steps of models with positions of their own, or logits of the last token alone", "refused", (
            "adversarial/test_positions::test_uncompiled_steps_of_models_with_own_positions_are_refused",
            "adversarial/test_counting::test_an_uncompiled_step_would_be_wrong")),
        Row("what an uncompiled forward reads changes between steps; so do hooks, by hand", "proved again", (
            "adversarial/test_mixers::test_changes_between_uncompiled_steps_are_seen",
            "adversarial/test_mixers::test_a_hook_between_steps_by_hand_is_seen")),
        Row("labels, losses of routers and filled caches in an uncompiled step", "refused", (
            "passes/test_step::test_inputs_that_are_no_ragged_row",)),
        Row("padding in `generate` that a model without `position_ids` counts", "transformers' own path", (
            "graph_runner/test_hf_generate::test_a_model_that_counts_padding",)),
        Row("masks with holes on window models; odd numbers of `generate`", "transformers' own path", (
            "graph_runner/test_paged::test_masks_with_holes_and_windows",
            "graph_runner/test_paged::test_numbers_as_transformers_reads_them",
            "graph_runner/test_paged::test_other_options_beside_such_numbers")),
        Row("`logits_to_keep` that the model ignores", "exact", (
            "passes/capture/test_paged_model::test_logits_to_keep_that_is_ignored",)),
    ],
    "The model and the engine": [
        Row("weights quantized otherwise while the engine is open", "traced again, or refused", (
            "graph_runner/test_quantized::test_weights_quantized_otherwise",)),
        Row("hidden states, checkpointing, `enable_input_require_grads`, training", "the engine goes on", (
            "graph_runner/test_live_model::test_ordinary_calls_do_not_concern_the_engine",
            "graph_runner/test_live_model::test_training_with_checkpointing")),
        Row("a change of what the trace read", "traced again", (
            "graph_runner/test_live_model::test_what_changes_the_forward_is_traced_again",
            "graph_runner/test_model_guard::test_a_patched_class")),
        Row("a change that cannot be served", "named: module, attribute, before, after", (
            "graph_runner/test_live_model::test_a_change_that_cannot_be_served",)),
        Row("a mask's buffer in place; `generation_config` while open", "noticed", (
            "graph_runner/test_live_model::test_a_mask_updated_in_place",
            "graph_runner/test_live_model::test_end_tokens_set_while_open")),
        Row("memory that parameters share", "kept", ("passes/fusions/test_base::test_what_a_closed_model_gets_back",)),
        Row("threads", "each request equals its run alone", (
            "graph_runner/test_engine_lock::test_no_step_comes_before_a_request_is_registered",
            "graph_runner/test_engine_lock::test_a_row_that_is_aborted_is_an_error", "graph_runner/test_soak::test_soak")),
        Row("a dropped stream", "aborted at once", (
            "graph_runner/test_engine_lock::test_an_idle_engine_drops_an_abandoned_stream_at_once",)),
        Row("a bad request", "raised, or logged", ("graph_runner/test_engine::test_raise_on_error",)),
    ],
}


def node_ids() -> Iterator[str]:
    """Each test of the table, as pytest names it."""
    for row in itertools.chain.from_iterable(SECTIONS.values()):
        for test in row.tests:
            file, _, name = test.partition("::")
            for route in ROUTES if "-*]" in name else ("",):
                yield f"tests/{file}.py::{name.replace('-*]', f'-{route}]')}"


def collected(node_id: str) -> bool:
    """Whether there is such a test, by the parameters of its marks."""
    file, _, name = node_id.removesuffix("]").partition(".py::")
    name, _, parameter = name.partition("[")
    function = getattr(importlib.import_module(file.replace("/", ".")), name, None)
    marks = [m for m in getattr(function, "pytestmark", ()) if m.name == "parametrize"]
    if function is None or not parameter:
        return function is not None
    each = [mark.kwargs.get("ids") or [
        getattr(v, "id", None) or "-".join(map(str, getattr(v, "values", v if isinstance(v, tuple) else (v,))))
        for v in mark.args[1]] for mark in marks]
    return parameter in ("-".join(ids) for ids in itertools.product(*reversed(each)))


def render() -> str:
    """The page."""
    lines = [
        "# Never silently wrong: the cases", "",
        "Written by `python -m tests.adversarial.proof_table`. A case is exact (logits equal a forward of each sequence",
        "alone, in float32) or refused, on four routes: `quire.Engine`, the decorator `quire.paged`,",
        "`torch.compile(backend=\"quire\")`, and an uncompiled forward in `quire.step`. Tests with `-*` run on each of the",
        "first three. The fourth runs the same proof of the operations (`test_uncompiled`), for transformers models.",
        "More cases, random ones, and a mutant of each rule: [tests/adversarial](../tests/adversarial/README.md).", ""]
    for section, rows in SECTIONS.items():
        lines += [f"## {section}", "", "| case | outcome | tests, in `tests/` |", "|---|---|---|"]
        for row in rows:
            by_file: dict[str, list[str]] = {}
            for test in row.tests:
                where, _, name = test.partition("::")
                by_file.setdefault(where, []).append(name)
            tests = "; ".join(f"`{where}.py`: " + ", ".join(f"`{n}`" for n in names) for where, names in by_file.items())
            lines.append(f"| {row.case} | {row.outcome} | {tests} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render())

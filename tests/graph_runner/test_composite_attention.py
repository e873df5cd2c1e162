"""Two backends in one engine: by phase and by kind of layer, with the same tokens, explained site by site."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

import quire
from quire.attn_ops import long_prefill
from quire.attn_ops.backend import PrefillPart, define_paged_op, define_state_op
from quire.attn_ops.backends import torch_native
from quire.attn_ops.registry import all_backends, register_backend
from quire.attn_ops.tuning.prefill import PrefillRule, PrefillTime
from tests.tiny import hf_greedy, small_llama

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=32, max_position_embeddings=64)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [3], [9, 8, 7, 6]]
calls: list[tuple[str, bool, int | None]] = []


def _op(*args, **options):
    calls.append(("second", len(args[0]) <= len(args[10]), options["window"]))
    return torch_native.paged_attention(*args, **options)


@pytest.fixture(scope="module", autouse=True)
def second() -> None:
    if "second_part" not in all_backends():
        register_backend(dataclasses.replace(torch_native.BACKEND, name="second_part", priority=None, prepare=None,
                                             op=define_paged_op("second_part_for_test", _op)))


@pytest.fixture(scope="module")
def gemma2():
    """Every other layer has a window."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=5, query_pre_attn_scalar=64)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama4():
    """Three of four layers have chunks, the other sees everything."""
    def op(*args, **options):
        calls.append(("without_chunks", len(args[0]) <= len(args[10]), options["window"]))
        assert options["chunk"] is None
        return torch_native.paged_attention(*args, **options)

    if "without_chunks" not in all_backends():
        caps = dataclasses.replace(torch_native.BACKEND.capabilities, chunk=False)
        register_backend(dataclasses.replace(torch_native.BACKEND, name="without_chunks", priority=None, capabilities=caps,
                                             op=define_paged_op("without_chunks_for_test", op)))
    torch.manual_seed(0)
    sizes = SIZES | dict(num_hidden_layers=4, head_dim=16, attention_chunk_size=8, num_local_experts=2,
                         intermediate_size_mlp=96)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Llama4TextConfig(**sizes, initializer_range=0.5))
    return model.eval()


def generate(model, attention, **options) -> list[list[int]]:
    with quire.Engine(model, attention=attention, num_pages=32, page_size=4, max_num_seqs=4, max_model_len=32, **options) as e:
        calls.clear()  # those of its start
        return [o.token_ids for o in e.generate(PROMPTS, quire.SamplingParams(max_tokens=6, temperature=0))]


@pytest.fixture(scope="module")
def expected(gemma2) -> list[list[int]]:
    return generate(gemma2, "torch_native")


def test_an_engine_with_two_backends(gemma2, expected) -> None:
    assert generate(gemma2, "hybrid:second_part+torch_native", cudagraph_capture_sizes=[]) == expected
    assert calls and not any(decode for _, decode, _ in calls)
    assert generate(gemma2, "hybrid:torch_native+second_part") == expected
    assert any(decode for _, decode, _ in calls)
    assert generate(gemma2, {"full": "torch_native", "window": "second_part"}) == expected
    assert {window for _, _, window in calls} == {5}


def long_for_test() -> str:
    """The name of a backend whose prompts are second_part's, which gains by them."""
    if "long_for_test" not in all_backends():
        rule = PrefillRule(PrefillTime(1e5, 0, 0), PrefillTime(1e6, 0, 0))
        part = PrefillPart(lambda *args: None, lambda *args: None)
        prompts = dataclasses.replace(all_backends()["second_part"], prefill=part)
        register_backend(long_prefill.make("long_for_test", prompts, torch_native.BACKEND, rule=lambda *args, **where: rule))
    return "long_for_test"


def test_long_prompts_by_another_backend(gemma2, expected) -> None:
    """Prompts that gain are served by it, out of their graphs too; decodes beside them and all other steps are not: the same
    tokens."""
    for options in ({}, dict(cudagraph_capture_sizes=[1, 2, 4], cudagraph_token_sizes=[8, 16, 32])):
        assert generate(gemma2, long_for_test(), **options) == expected
        assert calls and not any(decode for _, decode, _ in calls), options


@pytest.mark.parametrize("attention", [
    "local:torch_native", "local:without_chunks", {"full": "without_chunks", "chunk": "local:without_chunks"}], ids=str)
@pytest.mark.parametrize("options", [{}, dict(cudagraph_capture_sizes=[1, 2, 4], compiler="eager")], ids=["", "graphs"])
def test_chunked_attention_as_virtual_sequences(llama4, attention, options) -> None:
    """Layers with chunks and full ones, with pages of their own that are freed behind a chunk: the tokens are transformers'."""
    prompts = [[*range(3, 24)], [7, 3], [*range(40, 25, -1)], [9, 8, 7, 6, 5, 4, 3]]
    expected = [hf_greedy(llama4, prompt, 10) for prompt in prompts]
    with quire.Engine(llama4, attention=attention, num_pages=64, page_size=4, max_num_seqs=4, max_model_len=48,
                      max_num_batched_tokens=16, **options) as engine:
        calls.clear()
        found = [o.token_ids for o in engine.generate(prompts, quire.SamplingParams(max_tokens=10, temperature=0))]
    assert found == expected
    assert bool(calls) == (attention != "local:torch_native")


def test_chunks_of_part_of_a_page_are_refused(llama4) -> None:
    with pytest.raises(quire.UnsupportedAttention, match="chunks of 8 tokens on pages of 16.*choose a page_size that divides"):
        quire.Engine(llama4, attention="local:torch_native", num_pages=8, page_size=16)
    explained = str(quire.explain(llama4, attention="local:torch_native", page_size=4))
    assert "torch_native_paged_attention on each chunk" in explained


def test_explain_says_which_backend_serves_a_site(gemma2) -> None:
    found = quire.explain(gemma2, attention={"full": "torch_native", "window": "hybrid:second_part+torch_native"})
    rows = {line.split()[0]: line for line in str(found).splitlines() if line[:1].isdigit()}
    assert rows["0"].endswith("second_part_paged_attention / torch_native_paged_attention")
    assert rows["1"].endswith(" torch_native_paged_attention")
    missing = quire.explain(gemma2, attention={"window": "torch_native"})
    assert "no backend is named for layers of kind 'full'" in missing.error


def test_bad_input(gemma2) -> None:
    with pytest.raises(ValueError, match="'windows' is none"):
        quire.Engine(gemma2, attention={"windows": "torch_native"})
    with pytest.raises(ValueError, match="unknown attention backend 'nobody'"):
        quire.Engine(gemma2, attention="hybrid:nobody+torch_native")
    with pytest.raises(quire.UnsupportedAttention, match="flashinfer: runs on cuda"):
        quire.Engine(gemma2, attention="hybrid:flashinfer+torch_native", num_pages=8, page_size=4)


@pytest.mark.slow
def test_compiled(gemma2, expected) -> None:
    """Through torch.compile and Inductor, whose graph holds what both parts prepare."""
    assert generate(gemma2, "hybrid:second_part+torch_native", compiler="inductor", fusions="all") == expected
    assert generate(gemma2, long_for_test(), compiler="inductor", fusions="all") == expected
    assert calls and not any(decode for _, decode, _ in calls)


@pytest.mark.slow
def test_an_engine_reads_a_common_prompt_once() -> None:
    """Requests that begin alike have the prefix cache's pages in common; the tokens are those of the backend alone. So they are
    where batches are cut in two."""
    model = small_llama(0.3)
    prefixes: list[int] = []

    def state(*args, causal, **options):
        prefixes.extend([] if causal else [int(args[10])])  # seq_lens of the prefix
        return torch_native.attention_state(*args, causal=causal, **options)

    if "with_state" not in all_backends():
        register_backend(dataclasses.replace(torch_native.BACKEND, name="with_state", priority=None,
                                             state_op=define_state_op("with_state_for_test", state)))
    prompts = [[*range(5, 18), n] for n in (20, 30, 40)]

    def tokens(attention: str) -> list[list[int]]:
        with quire.Engine(model, attention=attention, num_pages=32, page_size=4, max_num_seqs=4, max_model_len=32) as e:
            greedy = quire.SamplingParams(max_tokens=6, temperature=0)
            first = e.generate(prompts[:1], greedy)
            return [o.token_ids for o in (*first, *e.generate(prompts, greedy))]

    expected = tokens("torch_native")
    assert tokens("cascade:with_state@1") == expected
    assert max(prefixes) == 12
    assert tokens("two_batch:torch_native") == expected

"""An open engine and its model: ordinary calls leave it running, and what changes the forward is traced again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from quire import Engine, SamplingParams, UnsupportedAttention, explain, paged
from quire.passes.capture.paged_model import PagedModel
from tests.tiny import GREEDY, assert_idle, hf_greedy, own_greedy, tokens

pytestmark = pytest.mark.usefixtures("traces_kept")

IDS = [3, 4, 5]
SHORT = replace(GREEDY, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[])


@pytest.fixture
def model(one_layer: Any) -> Any:
    return copy.deepcopy(one_layer)


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, **OPTIONS) as made:
        assert tokens(made.generate(IDS, SHORT)) == [expected(model)]
        yield made
        assert_idle(made)


def expected(model: Any, count: int = SHORT.max_tokens or 0) -> list[int]:
    return hf_greedy(model, IDS, count, eos_token_id=None)


def train(model: Any) -> None:
    """As a Trainer does, with gradient checkpointing."""
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    ids = torch.tensor([IDS])
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.gradient_checkpointing_disable()
    model.eval()


def as_peft(model: Any) -> None:
    """What peft_model.generate() sets on its base model."""
    model.generation_config = copy.deepcopy(model.generation_config)
    model.prepare_inputs_for_generation = lambda *args, **kwargs: {}
    del model.prepare_inputs_for_generation


USES: dict[str, Callable[[Any], Any]] = {
    # What accelerate.prepare leaves on a model without mixed precision.
    "accelerate": lambda m: vars(m).update(_is_accelerate_prepared=True, hf_device_map={"": "cpu"}),
    "hidden states": lambda m: m(torch.tensor([IDS]), output_hidden_states=True, output_attentions=False),
    "input grads": lambda m: m.enable_input_require_grads(),
    "generate": lambda m: m.generate(torch.tensor([IDS]), max_new_tokens=2), "peft": as_peft,
    "beams": lambda m: m.generate(torch.tensor([IDS]), max_new_tokens=4, num_beams=2, do_sample=False),
    "pad_token_id": lambda m: setattr(m.config, "pad_token_id", 0), "explain": explain,
    "train": lambda m: m.train().requires_grad_(False),
}


def test_ordinary_calls_do_not_concern_the_engine(engine: Engine, model: Any, tmp_path: Path) -> None:
    """Of transformers, of libraries around it, and of quire itself."""
    runner = engine.runner
    for name, use in {"save": lambda m: m.save_pretrained(tmp_path), **USES}.items():
        use(model)
        got = engine.generate(IDS, SHORT)
        assert engine.runner is runner, name
        assert tokens(got) == [expected(model.eval())], name


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_training_with_checkpointing(engine: Engine, model: Any) -> None:
    before = expected(model)
    train(model)
    assert tokens(engine.generate(IDS, SHORT)) == [expected(model)] != [before]
    runner = engine.runner
    model.gradient_checkpointing_enable()
    assert tokens(engine.generate(IDS, SHORT)) == [expected(model)] and engine.runner is runner


class Adapter(nn.Module):
    """A LoRA layer, as peft puts it around a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base_layer, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 3 * self.up(self.down(x))


def adapters(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = Adapter(model.model.layers[0].self_attn.q_proj)


def scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 3


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (scale, "model.layers.0.self_attn.scaling: 0.3535533905932738 -> 1.06066"),
    (adapters, "module model.layers.0.self_attn.q_proj was replaced"),
    (lambda m: m.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2),
     "model.layers.0.mlp.forward hooks: [] -> "),
    (lambda m: m.set_attn_implementation("eager"), "_attn_implementation_internal: 'sdpa' -> 'eager'"),
    (lambda m: setattr(m.model.norm, "forward", lambda x: x * 2), "model.norm.forward: None -> "),
]


@pytest.mark.parametrize("fusions", [pytest.param("none", marks=pytest.mark.slow), "all"])
def test_what_changes_the_forward_is_traced_again(fusions: str, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(model, fusions=fusions, **OPTIONS) as engine:
        engine.generate(IDS, SHORT)
        for change, message in CHANGES:
            change(model)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "quire.graph_runner.live_model"):
                assert tokens(engine.generate(IDS, SHORT)) == [expected(model)], message
            assert [m for m in caplog.messages if message in m and m.endswith("tracing it again")], message
            assert len(caplog.messages) == 1 and tokens(engine.generate(IDS, SHORT)) == [expected(model)], message
        assert_idle(engine)


def test_functions_patched_outside_the_modules(engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's file, of transformers' tables, and the call of a class."""
    want, plain, runner = expected(model), llama.apply_rotary_pos_emb, engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, *args, **options: plain(q * 3, k, *args, **options))
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)] and engine.runner is not runner
    with monkeypatch.context() as patch:
        patch.setattr(llama.LlamaMLP, "__call__", lambda self, x: nn.Module.__call__(self, x) * 4, raising=False)
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)] != [want]
    assert tokens(engine.generate(IDS, SHORT)) == [want]
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **options: attend(*args, **options | {"scaling": 1.0}))
        with pytest.raises(RuntimeError, match="attention function 'sdpa': sdpa_attention_forward -> .*registered by the user"):
            engine.generate(IDS, SHORT)
    assert tokens(engine.generate(IDS, SHORT)) == [want]


def test_what_cannot_be_served_at_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention of the user's, a function of torch replaced by one that calls it, ids that no embedding has."""
    with monkeypatch.context() as patch:
        patch.setattr(llama, "eager_attention_forward", lambda *args, **options: None)
        Engine(model, **OPTIONS).close()  # not in use
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedAttention, match="'eager' is registered by the user: .*eager_attention_forward is not"):
            Engine(model, **OPTIONS)
        model.set_attn_implementation("sdpa")
    silu = F.silu
    with monkeypatch.context() as patch:
        patch.setattr(F, "silu", lambda x, inplace=False: silu(x) * 2)
        with pytest.raises(UnsupportedAttention, match="torch.nn.functional.silu was replaced by .*<lambda>"):
            Engine(model, **OPTIONS)
    rows = model.lm_head.out_features
    model.lm_head = nn.Linear(model.config.hidden_size, rows + 8, bias=False)
    with pytest.raises(UnsupportedAttention, match=f"{rows + 8} logits per token, and its embedding has {rows} rows"):
        Engine(model, **OPTIONS)


@pytest.mark.parametrize("mode", [pytest.param(True, marks=pytest.mark.slow), False])
def test_another_thread_changes_the_model_while_it_is_traced(mode: bool, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace is of one state, and what the other thread set stays."""
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "0")  # Dynamo traces it each time
    model.train(not mode)
    traces = []

    def disturbed(self: Any, *args: Any, _plain: Any = PagedModel._capture, **options: Any) -> Any:
        traces.append(model.training)
        if len(traces) == 1:
            model.train(mode)
            model.model.layers[0].self_attn.scaling *= 3
        return _plain(self, *args, **options)

    monkeypatch.setattr(PagedModel, "_capture", disturbed)
    with Engine(model, **OPTIONS) as engine:
        assert traces == [False, False] and model.training == mode
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]
        assert "train" not in vars(model)

    def always(self: Any, *args: Any, _plain: Any = PagedModel._capture, **options: Any) -> Any:
        scale(model)
        return _plain(self, *args, **options)

    monkeypatch.setattr(PagedModel, "_capture", always)
    if mode:
        with pytest.raises(RuntimeError, match=r"changed the model each of the .*self_attn.scaling: .* -> .*engine.lock.hold"):
            Engine(model, **OPTIONS)


@pytest.mark.parametrize("depth", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_a_change_while_requests_run(depth: bool, model: Any) -> None:
    """Noticed within as many steps as it takes to compare every module; requests go on with the new model from there."""
    with Engine(model, async_stepping=depth, **OPTIONS) as engine:
        ids = [engine.add_request(p, replace(SHORT, max_tokens=n))[0] for p, n in ((IDS, 60), ([7, 8], 50))]
        outputs = [engine.requests[i].output for i in ids]
        for _ in range(5):
            engine.step()
        runner, before = engine.runner, [list(o.token_ids) for o in outputs]
        scale(model)
        steps = 0
        while engine.runner is runner:
            engine.step()
            steps += 1
        assert steps <= len(list(model.modules())) / 4 + 2
        kept = [list(o.token_ids) for o in outputs]
        while engine.has_unfinished:
            engine.step()
        for prompt, output, some, first in zip((IDS, [7, 8]), outputs, kept, before, strict=True):
            assert output.token_ids[: len(first)] == first and output.finish_reason == "length"
            rest = hf_greedy(model, [*prompt, *some], len(output.token_ids) - len(some), eos_token_id=None)
            assert output.token_ids == [*some, *rest]
        assert_idle(engine)


def test_a_change_that_cannot_be_served(engine: Engine, model: Any) -> None:
    """Said with its reason, again at every step, until it is undone; the request then goes on."""
    want = expected(model)

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1, keepdim=True).expand_as(x)

    norm = model.model.norm
    model.model.norm = Mean()
    (request,) = engine.add_request(IDS, SHORT)
    output = engine.requests[request].output
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"(?s)\(module model.norm was replaced\), and cannot be served.*Undo the"):
            engine.step()
    assert output.token_ids == []
    model.model.norm = norm
    while engine.has_unfinished:
        engine.step()
    assert output.token_ids == want


def test_a_change_that_fails_without_a_word(engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is never empty: it would say that something is wrong, and nothing of what."""
    def broken(*args: Any) -> Any:
        raise StopIteration

    model.model.norm.register_forward_hook(lambda module, inputs, output: output * 2)
    with monkeypatch.context() as patched:
        patched.setattr("quire.graph_runner.live_model.ModelRunner", broken)
        with pytest.raises(RuntimeError, match="cannot be served as it is now: StopIteration. Undo the change"):
            engine.generate(IDS, SHORT)
    while engine.has_unfinished:
        engine.step()
    assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]


def test_closed_after_a_change_that_cannot_be_served(model: Any) -> None:
    with Engine(model, fusions="all", **OPTIONS) as engine:
        model.forward = lambda input_ids: None
        with pytest.raises(RuntimeError, match="LlamaForCausalLM.forward: None -> "):
            engine.generate(IDS, SHORT)
        assert_idle(engine)
    del model.forward
    model(torch.tensor([IDS])).logits.sum().backward()


def test_a_closed_engine_leaves_its_model_alone(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(model, **OPTIONS)
    engine.close()
    scale(model)
    assert [engine.step() for _ in range(9)] == [[]] * 9
    assert not caplog.messages


def test_a_vocabulary_of_another_size(engine: Engine, model: Any) -> None:
    """As trainers make it for tokens of their own: by the old size, prompts would be refused, or read beyond the rows."""
    size = engine.limits.vocab_size
    model.resize_token_embeddings(size + 2, mean_resizing=False)
    ids = [size + 1, 5]
    assert tokens(engine.generate(ids, SHORT)) == [hf_greedy(model, ids, 8, eos_token_id=None)]
    model.resize_token_embeddings(size)
    with pytest.raises(ValueError, match=f"outside the vocabulary of {size} tokens"):
        engine.generate(ids, SHORT)
    assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]


def test_a_smaller_vocabulary_while_requests_run(engine: Engine, model: Any) -> None:
    """Only requests that have tokens beyond it end, with the cause: neither an error for all, nor a read beyond the rows."""
    size = engine.limits.vocab_size
    few = replace(SHORT, allowed_token_ids=list(range(10)), ignore_eos=True)
    prompts = [[3, 4], [3, size - 1], [5], [4], [6], [size - 2]]
    params = [few, few, few, replace(few, logprob_token_ids=[size - 1]), replace(few, repetition_penalty=1.5), few]
    events = engine.stream(prompts, params, raise_on_error=False)
    began = [next(events) for _ in range(6)]
    assert not any(event.finished for event in began) and engine.scheduler.waiting  # the last prompts wait for a slot
    model.resize_token_embeddings(size - 2)
    done = {event.index: event.output for event in events if event.finished}
    said = f"vocabulary, which was changed to {size - 2} tokens"
    assert done[1].error == f"its token ids [{size - 1}] are outside the {said}"
    assert done[5].error == f"its token ids [{size - 2}] are outside the {said}"
    assert done[3].error == (f"the model's vocabulary was changed: logprob_token_ids [{size - 1}] have no logits; the model "
                             f"has {size - 2}")
    assert [(done[i].error, len(done[i].token_ids)) for i in (0, 2, 4)] == [(None, 8)] * 3
    assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]


def test_a_smaller_vocabulary_while_rows_advance_together(model: Any) -> None:
    """As the engine's own requests, ``generate`` with a processor says what is wrong."""
    size = model.config.vocab_size
    paged(model, **OPTIONS)

    def shrink(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 4:
            model.resize_token_embeddings(size - 1)
        return scores

    with pytest.raises(RuntimeError, match=rf"generate\(\) cannot go on: its token ids \[{size - 1}\] are outside"):
        model.generate(torch.tensor([[3, size - 1]]), logits_processor=[shrink], max_new_tokens=6, eos_token_id=-1)
    assert_idle(model.generate.engine)
    model.generate.close()


def test_end_tokens_set_while_open(engine: Engine, model: Any) -> None:
    want = expected(model)
    model.generation_config.eos_token_id = want[3]
    (output,) = engine.generate(IDS, replace(SHORT, ignore_eos=False))
    at = want.index(want[3])
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (want[: at + 1], "stop", None)


class Masked(nn.Module):
    """Its window is held in a buffer, which tracing reads."""

    def __init__(self, window: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.register_buffer("mask", self.banded(window))

    @staticmethod
    def banded(window: int) -> torch.Tensor:
        return torch.ones(64, 64, dtype=torch.bool).tril().triu(1 - window)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = (self.embed(input_ids) + position_ids[..., None] * 0.01).unflatten(-1, (2, 8)).transpose(1, 2)
        mask = self.mask[: x.shape[2], : x.shape[2]]
        return self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=mask).transpose(1, 2).flatten(2))


def test_a_mask_updated_in_place() -> None:
    model, ids, params = Masked(64), [1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=12, temperature=0)
    with Engine(model, max_model_len=32, page_size=4, **OPTIONS) as engine:
        before = engine.generate(ids, params)[0].token_ids
        model.mask.copy_(Masked.banded(2))
        assert engine.generate(ids, params)[0].token_ids == own_greedy(model, ids, 12) != before


class Counting(Masked):
    """Updates a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__(64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x = (self.embed(input_ids) + position_ids[..., None] * 0.01).unflatten(-1, (2, 8)).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2))


def test_a_buffer_that_the_forward_updates_is_no_change() -> None:
    with Engine(Counting(), max_model_len=32, page_size=4, **OPTIONS) as engine:
        runner = engine.runner
        assert len(engine.generate([1, 2, 3], SamplingParams(max_tokens=6, temperature=0))[0].token_ids) == 6
        assert engine.runner is runner

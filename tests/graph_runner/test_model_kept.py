"""``quire.paged`` keeps what a model has: hooks, a patched forward, copies; and interrupted steps are computed again."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch

import quire
from quire.graph_runner.sampling_params import SamplingParams
from tests.tiny import load_model as load_shipped
from tests.tiny import load_tokenizer

IDS = torch.tensor([[30, 31, 32, 33]])
LONG = "Once upon a time, there was a little boy who had a red ball and a blue hat"


def load_model():
    return load_shipped(num_layers=2)


def generate(model) -> list[int]:
    return model.generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist()


def shifted(output):
    output.logits = output.logits.roll(1, -1)
    return output


def test_hooks_of_the_model_itself() -> None:
    model = load_model()
    plain = generate(model)
    hook = model.register_forward_hook(lambda module, args, output: shifted(output))
    hooked = generate(model)
    assert hooked != plain
    quire.paged(model)
    assert generate(model) == hooked
    hook.remove()
    assert generate(model) == plain  # traced again


def test_a_forward_patched_on_the_instance() -> None:
    model = load_model()
    own = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: shifted(own(*args, **kwargs)), model)
    patched, result = model.forward, generate(model)
    quire.paged(model)
    assert generate(model) == result
    model.generate.close()
    assert model.forward is patched and "generate" not in model.__dict__


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(way) -> None:
    model = load_model()
    plain = generate(model)
    quire.paged(model)
    assert generate(model) == plain
    other = way(model)
    assert other is not model and generate(other) == plain


def other_function(model) -> None:
    model.model.layers[0].mlp.act_fn = torch.sin


def untie(model) -> None:
    torch.manual_seed(0)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape))


def untie_by_loading(model) -> None:
    untied = {name: t + 0.1 * (name == "lm_head.weight") for name, t in model.state_dict().items()}
    model.load_state_dict(untied, assign=True)


def scale(model) -> None:
    model.model.layers[0].self_attn.scaling *= 2


@pytest.mark.parametrize("change", [scale, other_function, untie, untie_by_loading], ids=lambda f: f.__name__)
def test_changed_after_the_trace(change) -> None:
    model, same = load_model(), load_model()
    for m in (model, same):
        for layer in m.model.layers:
            del layer.mlp.act_fn
            layer.mlp.act_fn = torch.nn.functional.silu
    quire.paged(model)
    generate(model)
    change(model)
    change(same)
    assert generate(model) == generate(same)


def test_using_transformers_changes_nothing(tmp_path) -> None:
    """Its own forward, ``generate`` and saving, between two runs of an engine; and other models of quire's."""
    model, same = load_model(), load_model()
    with quire.Engine(model, num_pages=16) as engine:
        model(IDS)
        generate(model)
        model.generate(IDS, max_new_tokens=4, num_beams=2, do_sample=False)
        model.save_pretrained(tmp_path)
        model.config.pad_token_id = 0
        assert quire.explain(model)
        [output] = engine.generate(IDS.tolist(), SamplingParams(max_tokens=8, temperature=0))
        assert IDS[0].tolist() + output.token_ids == generate(same)


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_an_interrupted_step_is_computed_again(at, monkeypatch) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    with quire.Engine(load_model(), load_tokenizer(), max_num_batched_tokens=8) as engine:
        [whole] = engine.generate(LONG, greedy)
        launch, count = engine.runner.launch, 0

        def interrupted(batch):
            nonlocal count
            count += 1
            if count == at:
                raise KeyboardInterrupt
            return launch(batch)

        monkeypatch.setattr(engine.runner, "launch", interrupted)
        engine.add_request(LONG, greedy)
        finished, turns = [], 0
        while engine.has_unfinished:
            turns += 1
            assert turns < 100
            try:
                finished += [e.output.token_ids for e in engine.step() if e.finished]
            except KeyboardInterrupt:
                continue
        assert count >= at and finished == [whole.token_ids]

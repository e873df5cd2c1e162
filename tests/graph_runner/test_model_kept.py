"""``quire.paged`` keeps what a model has: hooks, a patched forward, copies; and interrupted steps are computed again."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch

import quire
from graph_runner.sampling_params import SamplingParams
from tests.tiny import load_model, load_tokenizer

IDS = torch.tensor([[30, 31, 32, 33]])
LONG = "Once upon a time, there was a little boy who had a red ball and a blue hat"


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
    assert generate(model) == plain  # on an engine made anew


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


def test_a_setting_changed_after_the_trace() -> None:
    model, same = load_model(), load_model()
    quire.paged(model)
    generate(model)
    for m in (model, same):
        m.model.layers[0].self_attn.scaling *= 2
    assert generate(model) == generate(same)
    with quire.Engine(same) as engine:
        same.model.layers[0].self_attn.scaling *= 2
        with pytest.raises(RuntimeError, match="self_attn: its settings changed"):
            engine.generate([[30, 31]])


def test_a_setting_changed_while_a_request_runs() -> None:
    """Noticed within as many steps as it takes to look at every module; undone, the request goes on as if nothing had been."""
    model, greedy = load_model(), SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with quire.Engine(model, load_tokenizer()) as engine:
        [whole] = engine.generate(LONG, greedy)
        engine.add_request(LONG, greedy)
        engine.step()
        model.model.layers[1].mlp.act_fn.inplace = True
        steps = 0
        with pytest.raises(RuntimeError, match="model.layers.1.mlp.act_fn: its settings changed"):
            while True:
                engine.step()
                steps += 1
        assert steps <= len(list(model.modules())) / 4 + 1 and engine.has_unfinished
        del model.model.layers[1].mlp.act_fn.inplace
        finished = [e for _ in range(100) if engine.has_unfinished for e in engine.step() if e.finished]
        assert [e.output.token_ids for e in finished] == [whole.token_ids]


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

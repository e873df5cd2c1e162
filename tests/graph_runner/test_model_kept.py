"""``quire.paged`` and the model: hooks, a patched forward, the class and copies; changes; what ``close`` restores."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import reset_code
from transformers import LlamaForCausalLM

import quire
from quire.graph_runner.paged import PagedGenerate
from tests.tiny import assert_unchanged, generated, small_llama, snapshot

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

IDS = torch.tensor([[5, 6, 7]])
SMALL = dict(num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[])


def small(**options: Any) -> Any:
    return small_llama(0.3, eos_token_id=None, pad_token_id=0, **options)


def test_close_restores() -> None:
    model, want = small(), generated(small())
    before = snapshot(model)
    assert quire.paged(model, fusions="all", **SMALL) is model
    assert generated(model) == want
    engine = model.generate.engine
    model.generate.close()
    assert_unchanged(model, before)
    assert not isinstance(model.generate, PagedGenerate) and "forward" not in vars(model)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.generate([[5]])
    assert generated(model) == want


def test_paged_twice_is_paged_once() -> None:
    model = small()
    before = snapshot(model)
    quire.paged(model, **SMALL)
    first = model.generate.engine
    quire.paged(model, **SMALL, page_size=4)
    assert first._closed and model.generate.engine.runner.cache.page_size == 4
    assert generated(model) == generated(small())
    model.generate.close()
    assert_unchanged(model, before)


def test_options_are_the_engines() -> None:
    model = quire.paged(small())
    with pytest.raises(ValueError, match="unknown attention backend 'nope'"):
        quire.paged(model, attention="nope")
    with pytest.raises(TypeError, match="quire.Engine has no option atention; it has attention, page_size, "):
        quire.paged(model, atention="triton")
    assert isinstance(model.generate, PagedGenerate)  # refused before anything was changed


def replica(model: nn.Module) -> nn.Module:
    """As ``nn.DataParallel`` makes one for each device."""
    made = model._replicate_for_data_parallel()
    made._modules = dict(model._modules)
    return made


@pytest.mark.parametrize("way", [copy.copy, replica], ids=["copy", "replica"])
def test_a_copy_that_shares_the_dict_runs_its_own_modules(way) -> None:
    model, plain = quire.paged(small(), **SMALL), small()
    want = generated(model)
    copies = [way(m) for m in (model, plain)]
    for made in copies:
        made._modules = dict(made._modules)
        torch.manual_seed(3)
        made.lm_head = nn.Linear(32, 64, bias=False)
    copied, expected = copies
    with torch.no_grad():
        assert torch.equal(copied(IDS).logits, expected(IDS).logits)
    if way is copy.copy:  # a replica has no parameters, and so no engine
        assert generated(copied) == generated(expected) != want
        model.generate.close()
        assert isinstance(copied.generate, PagedGenerate) and generated(copied) == generated(expected)
        copied.generate.close()
        assert type(copied) is type(expected)
    assert generated(model) == want


def test_the_class_is_as_good_as_before(tmp_path) -> None:
    """It is called the same, is the same for all its models, and can be saved whole."""
    plain = small()
    model, other = quire.paged(small(), **SMALL), quire.paged(small(), **SMALL)
    assert type(model) is type(other) and str(type(model)) == str(type(plain)) and repr(model) == repr(plain)
    want = generated(plain)
    copies = [pickle.loads(pickle.dumps(model, protocol)) for protocol in (0, 2, 5)]
    assert all(type(made) is type(model) for made in copies) and generated(copies[0]) == want
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(loaded, LlamaForCausalLM) and type(loaded) is type(model) and generated(loaded) == want
    model.save_pretrained(tmp_path)
    assert generated(LlamaForCausalLM.from_pretrained(tmp_path).eval()) == want
    for m in (model, other, loaded):
        m.generate.close()
        assert type(m) is LlamaForCausalLM


def test_a_dropped_trace_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "0")  # Dynamo has the trace
    model = quire.paged(small(), **SMALL)
    before, first = generated(model), model.generate.engine
    reset_code(first.runner.paged.traced_code)  # as torch._dynamo.reset() does to all
    assert generated(model) == before
    assert model.generate.engine is first
    model.generate.close()


def test_a_forward_patched_on_the_instance_stays() -> None:
    """As accelerate and others do it: it is traced, called outside of steps, and there again in the end."""
    model, plain = small(), small()
    forwards = []
    for m in (model, plain):
        def patched(*args, _own=m.forward, **kwargs):
            out = _own(*args, **kwargs)
            out.logits = out.logits * -1
            return out

        m.forward = patched
        forwards.append(patched)
    want = generated(plain)
    assert want != generated(small())
    quire.paged(model, **SMALL)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert generated(model) == want
    model.generate.close()
    assert model.forward is forwards[0] and generated(model) == want


def test_what_it_takes() -> None:
    own = type("GPT", (torch.nn.Linear,), {"generate": lambda self, idx, max_new_tokens: idx})
    with pytest.raises(TypeError, match="generate.. of GPT is its own, and not transformers'; use quire.Engine"):
        quire.paged(own(1, 1))
    with pytest.raises(TypeError, match="Linear has no generate.*decorate its forward with quire.paged, or use"):
        quire.paged(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes the model itself, not what torch.compile made of it. Page it first"):
        quire.paged(torch.compile(small()))
    with pytest.raises(TypeError, match="quire.paged takes a model or a forward function, got int"):
        quire.paged(3)
    with pytest.raises(TypeError, match="unknown options for backend 'quire': .'page_sze'."):
        quire.paged(lambda self: None, page_sze=4)


def test_hooks_of_the_model_itself() -> None:
    model = small()
    plain = generated(model)

    def shifted(module, args, output):
        output.logits = output.logits.roll(1, -1)
        return output

    hook = model.register_forward_hook(shifted)
    hooked = generated(model)
    assert hooked != plain
    quire.paged(model, **SMALL)
    assert generated(model) == hooked
    first = model.generate.engine
    hook.remove()
    assert generated(model) == plain  # traced again
    assert model.generate.engine is first
    model.generate.close()


def untie_by_loading(model) -> None:
    state = model.state_dict()
    model.load_state_dict({**state, "lm_head.weight": state["lm_head.weight"].roll(1, 0)}, assign=True)


def test_a_head_that_is_untied_after_the_trace() -> None:
    model, same = (small(tie_word_embeddings=True) for _ in range(2))
    quire.paged(model, **SMALL)
    before = generated(model)
    untie_by_loading(model)
    untie_by_loading(same)
    assert generated(model) == generated(same) != before
    model.generate.close()

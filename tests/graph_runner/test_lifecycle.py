"""An engine is made or refused, interrupted, closed; the model afterwards. tests/graph_runner/test_live_model.py has changes of
the model meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch

from quire import Engine, SamplingParams
from quire.graph_runner.cuda_graph import CudaGraphRunner
from tests.tiny import GREEDY, SAMPLED, assert_idle, hf_greedy, tokens, unchanged, with_other_weights

pytestmark = pytest.mark.usefixtures("traces_kept")


@pytest.mark.parametrize(("options", "message"), [
    (dict(page_size=0), "page_size must be at least 1, got 0"),  # tests/graph_runner/test_config.py has the others
    (dict(max_model_len=5000), "max_model_len=5000, but the model has 1024 positions"),
    (dict(kv_cache_dtype="bfloat16"), r"KV cache dtype bfloat16 \(has the model's own dtype, float8_e4m3fn, "),
    (dict(attention="flashinfer"),
     "(?s)attention='flashinfer' cannot serve this model on cpu.*Can serve it here: .*torch_native"),
    (dict(max_num_seqs=4, cudagraph_capture_sizes=[8]), "batch size 8 in the list to capture is larger than any batch"),
    (dict(max_num_batched_tokens=64, cudagraph_token_sizes=[65]), "token count 65 in the list to capture is larger"),
])
def test_bad_arguments(options, message, one_layer) -> None:
    with unchanged(one_layer), pytest.raises(ValueError, match=message):
        Engine(one_layer, **(dict(num_pages=8, max_num_seqs=2) | options))


@pytest.mark.parametrize("depth", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_nan_fails_one_request_only(depth, model, prompts) -> None:
    """Also not those that later get the pages in which the NaNs are."""
    poisoned = copy.deepcopy(model)
    poisoned.lm_head.weight = torch.nn.Parameter(poisoned.lm_head.weight.detach().clone())  # untied from the embedding
    bad, bad_prompt = 1700, [1700] * 40
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[bad] = float("nan")
    good = prompts[:3]
    expected = [hf_greedy(model, p, 6) for p in good]
    params = replace(GREEDY, max_tokens=6)
    with Engine(poisoned, num_pages=7, page_size=16, max_num_seqs=4, async_stepping=depth) as engine:
        for batch in ([good[0], [5, bad, 7], *good[1:]], [bad_prompt, *good], [bad_prompt, *good]):
            outputs = engine.generate(batch, params)
            failed = outputs.pop(next(i for i, p in enumerate(batch) if bad in p))
            assert tokens(outputs) == expected
            assert (failed.finish_reason, failed.token_ids) == ("error", [])
            assert f"the logits for token {len(failed.prompt_token_ids)} contain NaN" in failed.error
            assert tokens(engine.generate(good, params)) == expected
            assert_idle(engine)


def test_out_of_memory_while_capturing(one_layer, monkeypatch) -> None:
    gc.unfreeze()  # tests/conftest.py
    capture_one = CudaGraphRunner._capture_one

    def fails(self, bucket):
        if bucket.num_reqs < 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        capture_one(self, bucket)

    monkeypatch.setattr(CudaGraphRunner, "_capture_one", fails)
    options = dict(num_pages=40, max_num_seqs=8, cudagraph_capture_sizes=[4, 8])
    message = (r"out of GPU memory while capturing the CUDA graph of 4 rows\. Give the KV cache less .*, capture fewer or "
               r"smaller batches .*, or none \(cudagraph_capture_sizes=\[\]\)")
    with unchanged(one_layer), pytest.raises(RuntimeError, match=message) as caught:
        Engine(one_layer, fusions="all", **options)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert gc.isenabled() and gc.get_freeze_count() < 1000, "the collector rests no longer"
    monkeypatch.undo()
    with Engine(one_layer, **options) as engine:
        assert tokens(engine.generate([3, 4, 5], GREEDY)) == [hf_greedy(one_layer, [3, 4, 5], GREEDY.max_tokens)]


@pytest.mark.parametrize("depth", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_an_interrupted_step_is_taken_back(depth, model, prompts, expected, sampled, monkeypatch) -> None:
    """Whatever comes out of a step (Ctrl-C, an error of a kernel), the requests go on as if it had not been tried."""
    with Engine(model, num_pages=14, page_size=8, max_num_seqs=8, async_stepping=depth) as engine:
        launch, calls = engine.runner.launch, Counter()

        def interrupted(batch):
            calls["launch"] += 1
            if calls["launch"] % 3 == 0:
                raise KeyboardInterrupt
            return launch(batch)

        monkeypatch.setattr(engine.runner, "launch", interrupted)
        for params, want in ((GREEDY, expected), (SAMPLED, sampled)):
            ids = [engine.add_request(p, params)[0] for p in prompts]
            found: dict[int, list[int]] = {i: [] for i in ids}
            while engine.has_unfinished:
                try:
                    for event in engine.step():
                        found[event.index] += event.token_ids
                except KeyboardInterrupt:
                    pass
            assert list(found.values()) == want
            assert_idle(engine)
        stream = engine.stream(prompts[:2], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert_idle(engine)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(model, copied) -> None:
    """A copy would share the pages of the first, and give them to other requests."""
    with Engine(model, num_pages=8, max_num_seqs=1) as engine, pytest.raises(TypeError, match="an engine cannot be copied"):
        copied(engine)


def test_close(model, prompts, expected) -> None:
    engine = Engine(model, num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[])
    stream = engine.stream(prompts[:3], GREEDY)
    outputs = [next(stream).output for _ in range(3)]
    engine.close()
    engine.close()
    assert sorted(e.index for e in stream if e.finished) == [0, 1, 2]  # and does not wait for ever
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert outputs[0].token_ids == expected[0][: len(outputs[0].token_ids)]
    for use in (lambda: engine.generate(prompts[0]), lambda: engine.add_request(prompts[0]),
                lambda: next(engine.stream("a")), lambda: engine.update_weights_from_tensors({})):
        with pytest.raises(RuntimeError, match="the engine is closed; make a new one"):
            use()
    assert engine.step() == []


@pytest.mark.parametrize(("fusions", "training"), [("none", False), ("all", True)], ids=["plain", "fused_train"])
def test_the_model_afterwards(fusions, training, model, prompts, expected) -> None:
    ours = copy.deepcopy(model)
    if training:
        ours.train()
        ours.model.layers[0].eval()
        ours.model.layers[-1].mlp.requires_grad_(False)
    pointers = {n: p.data_ptr() for n, p in ours.named_parameters()}
    with unchanged(ours):
        with Engine(ours, num_pages=40, max_num_seqs=8, fusions=fusions) as engine:
            assert tokens(engine.generate(prompts, GREEDY)) == expected
    if fusions == "none":
        assert pointers == {n: p.data_ptr() for n, p in ours.named_parameters()}
    # It still trains.
    ours.train()
    ids = torch.tensor([prompts[3]])
    ours(input_ids=ids, labels=ids).loss.backward()
    assert ours.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_two_engines_on_one_model(model, prompts, expected) -> None:
    options = dict(num_pages=40, max_num_seqs=8, cudagraph_capture_sizes=[])
    with unchanged(model), Engine(model, **options) as first, Engine(model, **options, page_size=4) as second:
        for engine in (first, second, first):
            assert tokens(engine.generate(prompts[:2], GREEDY)) == expected[:2]


@pytest.mark.parametrize("fusions", [pytest.param("none", marks=pytest.mark.slow), "all"])
def test_weight_updates_reach_the_engine(fusions, model, prompts, expected) -> None:
    ours, donor = copy.deepcopy(model), with_other_weights(model)
    changed = [hf_greedy(donor, p, GREEDY.max_tokens) for p in prompts]
    assert changed != expected
    with Engine(ours, num_pages=40, max_num_seqs=8, fusions=fusions) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        ours.load_state_dict(donor.state_dict())
        assert tokens(engine.generate(prompts, GREEDY)) == changed
        ours.load_state_dict(model.state_dict())
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        # Not in place: new tensors under the same parameters.
        for p, new in zip(ours.parameters(), donor.parameters(), strict=True):
            p.data = new.detach().clone()
        assert tokens(engine.generate(prompts, GREEDY)) == changed
    assert hf_greedy(ours, prompts[0], GREEDY.max_tokens) == changed[0]


def test_inference_mode(model, prompts, expected) -> None:
    """Made, used and closed inside torch.inference_mode, and used outside of it: the model can be trained as before."""
    ours = copy.deepcopy(model)
    with torch.inference_mode():
        engine = Engine(ours, num_pages=40, max_num_seqs=8, fusions="all")
        assert [o.token_ids for o in engine.generate(prompts[:2], GREEDY)] == expected[:2]
    assert [o.token_ids for o in engine.generate(prompts[:2], GREEDY)] == expected[:2]
    with torch.inference_mode():
        engine.close()
    assert not any(p.is_inference() for p in ours.parameters())
    ours(torch.tensor([[1, 2, 3]])).logits.sum().backward()


@pytest.mark.parametrize("options", [
    dict(fusions="all"), dict(fusions="none", enable_prefix_caching=True),
    *(pytest.param(dict(fusions="all", enable_prefix_caching=lasting), marks=pytest.mark.slow) for lasting in (True, False))],
    ids=str)
def test_parameters_made_in_inference_mode(options, model, prompts, expected) -> None:
    """Served as others are, fused or not, and all that may change them reaches the engine. A model that was loaded in inference
    mode could else not be served, or have no updates of its weights."""
    donor = with_other_weights(model)
    with torch.inference_mode():
        ours = copy.deepcopy(model)
        other = copy.deepcopy(donor.model.layers[0].mlp.gate_proj.weight)
    changed = [hf_greedy(donor, p, GREEDY.max_tokens) for p in prompts]
    with Engine(ours, num_pages=40, max_num_seqs=8, **options) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        engine.update_weights_from_tensors(donor.state_dict())
        assert tokens(engine.generate(prompts, GREEDY)) == changed != expected
        with torch.inference_mode():
            for p, old in zip(ours.parameters(), model.parameters(), strict=True):
                p.copy_(old)
        engine.reset_prefix_cache()  # PyTorch has not counted it
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        ours.model.layers[0].mlp.gate_proj.weight = other
        mixed = [hf_greedy(ours, p, GREEDY.max_tokens) for p in prompts]
        assert tokens(engine.generate(prompts, GREEDY)) == mixed != expected
        ours.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 0.9)  # traced again
        assert tokens(engine.generate(prompts, GREEDY)) == [hf_greedy(ours, p, GREEDY.max_tokens) for p in prompts]
    assert all(p.is_inference() for p in ours.parameters())
    assert len(hf_greedy(ours, prompts[0], 4)) == 4


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_autocast(model, prompts, compiler) -> None:
    """Made and used under autocast, an engine computes in the model's dtypes all the same: it serves others too, and later."""
    logits = []
    with torch.autocast("cpu", torch.bfloat16), Engine(model, num_pages=40, max_num_seqs=8, compiler=compiler) as engine:
        forward = engine.runner.forward
        engine.runner.forward = lambda *args: logits.append(forward(*args)) or logits[-1]
        engine.generate([prompts[0]], GREEDY)
        assert torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([prompts[0]])).logits[0, -1]
    assert (logits[0][0][0] - wanted).abs().max() <= 1e-5 * wanted.abs().max()  # bfloat16's eps is 8e-3


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [
    (torch.float64, "auto"), pytest.param(torch.bfloat16, "int8", marks=pytest.mark.slow)])
def test_default_dtype(model, prompts, expected, dtype, kv_cache_dtype) -> None:
    """That of new tensors, which scripts set to have their models made in it."""
    params = [GREEDY, SamplingParams(temperature=1e-6, top_k=5, min_p=0.1, max_tokens=GREEDY.max_tokens)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with Engine(model, num_pages=40, max_num_seqs=8, kv_cache_dtype=kv_cache_dtype) as engine:
            assert tokens(engine.generate(prompts[:2], params)) == expected[:2]
    finally:
        torch.set_default_dtype(before)


def test_default_dtype_set_later(engine, prompts) -> None:
    """By another part of the program: not one request's log probabilities or edits may end the steps of all."""
    params = [SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1),
              SamplingParams(temperature=0, max_tokens=4, logit_bias={7: 3.0}, repetition_penalty=1.3), GREEDY]

    def found():
        outputs = engine.generate(prompts[:3], params)
        scores = engine.score(prompts[:2], [[5, 6], [7]])
        return [(o.token_ids, o.logprobs, o.prompt_logprobs) for o in outputs], [s.logprobs for s in scores]

    wanted, before = found(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert found() == wanted
    finally:
        torch.set_default_dtype(before)

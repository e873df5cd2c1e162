"""The model that ships with quire, what transformers' own ``generate`` makes of it, and checks that tests share."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from quire.graph_runner.engine import Engine
from quire.graph_runner.loading import TINY_MODEL
from quire.graph_runner.request import RequestOutput
from quire.graph_runner.sampling_params import SamplingParams
from quire.graph_runner.step_buffers import BatchShape

# Of 1 to 40 tokens, so that a batch has pages and chunks that end at different places.
PROMPTS = (
    "Once upon a time", "The cat", "To make soup, you need",
    "The fox is a small animal. It lives in the forest and it eats mice. One day, the fox saw a rabbit near the river "
    "and",
    "Dear Anna,\n", "A", "Tom and Lucy went to the market because",
)
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=20)


def load_model(device: str = "cpu", dtype: torch.dtype = torch.float32, num_layers: int = 4) -> Any:
    """With fewer layers than its 4 it takes less long to trace, and what it writes is no longer language."""
    found = AutoModelForCausalLM.from_pretrained(str(TINY_MODEL), dtype=dtype).to(device).eval()
    del found.model.layers[num_layers:]
    found.config.num_hidden_layers = num_layers
    return found


def small_llama(std: float | None = None, **options: Any) -> Any:
    """A Llama of one layer, quick to trace, with random weights. ``std``: of its matrices; 0.3 makes attention far from
    uniform."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=32, max_position_embeddings=1024)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).eval()
    for p in model.parameters():
        if std is not None and p.dim() == 2:
            torch.nn.init.normal_(p, std=std)
    return model


def with_other_weights(model: Any) -> Any:
    """A copy whose fused projections have other values."""
    donor = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in donor.named_parameters():
            if "q_proj" in name or "gate_proj" in name:
                p.mul_(0.5)
    return donor


def load_tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_MODEL))
    tokenizer.padding_side = "left"
    return tokenizer


def hf_greedy(model: Any, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """The continuation of one prompt by transformers' own ``generate``."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
                         **options)
    return out[0, len(prompt) :].tolist()


def own_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The continuation of one prompt by whole forwards of a module that is not of transformers."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
    return ids[len(prompt) :]


def prompt_ids() -> list[list[int]]:
    tokenizer = load_tokenizer()
    return [tokenizer(p)["input_ids"] for p in PROMPTS]


@functools.cache
def greedy_continuations(num_layers: int) -> list[list[int]]:
    """What transformers makes of each prompt; computed once per process."""
    model = load_model(num_layers=num_layers)
    return [hf_greedy(model, p, GREEDY.max_tokens) for p in prompt_ids()]


@functools.cache
def sampled_continuations(num_layers: int) -> list[list[int]]:
    """What each prompt gives when it is sampled alone; computed once per process."""
    with Engine(load_model(num_layers=num_layers), num_pages=120, max_num_seqs=1, max_model_len=300,
                async_stepping=False) as engine:
        return [tokens(engine.generate([p], SAMPLED))[0] for p in prompt_ids()]


def generated(model: Any) -> list[int]:
    """A short prompt and what the model's ``generate`` makes of it, paged or not."""
    return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12)[0].tolist()


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of each continuation, none of which may have failed."""
    assert not [o.error for o in outputs if o.error]
    return [completion.token_ids for o in outputs for completion in o.outputs]


def assert_idle(engine: Engine) -> None:
    """Nothing runs, and every page and slot came back."""
    scheduler = engine.scheduler
    assert not engine.has_unfinished
    assert scheduler.allocator.num_free == scheduler.allocator.num_total
    assert sorted(scheduler.free_slots) == list(range(engine.runner.config.max_num_seqs))
    assert not engine.requests


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """All that an engine must leave as it was; compare with ``assert_unchanged``."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[int, list[str]] = {}
    for name, p in parameters.items():
        owners.setdefault(p.untyped_storage().data_ptr(), []).append(name)
    config = getattr(model, "config", None)
    return {
        "config": None if config is None else (config.to_dict(), config._attn_implementation),
        "keys": list(model.state_dict()),
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "training": {name: m.training for name, m in model.named_modules()},
        "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
        "identity": {name: id(p) for name, p in parameters.items()},
        "shared": sorted(map(sorted, owners.values())),
        "layout": {name: (p.stride(), p.storage_offset(), p.untyped_storage().nbytes())
                   for name, p in parameters.items()},
        "attributes": {name: sorted(m.__dict__) for name, m in model.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
    }


def assert_unchanged(model: torch.nn.Module, before: dict[str, Any]) -> None:
    """``model`` is as it was at ``before = snapshot(model)``: values, flags, and which parameters share memory."""
    after = snapshot(model)
    state = after.pop("state")
    assert list(state) == before["keys"]
    assert not [k for k in state if not torch.equal(state[k], before["state"][k])]
    for what, value in after.items():
        assert value == before[what], what


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """The model leaves this block as it entered it, its plain logits included, bit for bit."""
    device = next(model.parameters()).device
    ids = torch.arange(3, 40, device=device)[None]

    def logits() -> torch.Tensor:
        training = model.training
        flags = {m: m.training for m in model.modules()}
        model.eval()
        with torch.no_grad():
            out = model(input_ids=ids, use_cache=False).logits
        for module, flag in flags.items():
            module.training = flag
        assert model.training == training
        return out

    plain, before = logits(), snapshot(model)
    yield
    assert_unchanged(model, before)
    assert torch.equal(logits(), plain)


def decode_batch(engine: Engine, prompts: Sequence[Sequence[int]]) -> Any:
    """Start the prompts and go on until the next step only decodes; that step's batch, scheduled and not launched."""
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    while True:
        waiting = engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running)
        if not waiting:
            engine.collect()
            batch = engine.scheduler.schedule()
            assert batch.is_decode and len(batch.rows) == len(prompts)
            return batch
        engine.step()


def run_batch(engine: Engine, batch: Any, bucket: Any) -> torch.Tensor:
    """Logits of the batch's rows: in the captured ``bucket``, or as it is where that is None. The cache is written."""
    logits = engine.runner.forward(engine.runner.stage(batch, bucket))[0]
    return logits[: len(batch.rows)].clone()


def check_padded_bucket(engine: Engine, prompts: Sequence[Sequence[int]], bucket: BatchShape, tolerance: float) -> None:
    """A batch in a larger bucket: the logits and the written slots of an unpadded run, and no other slot touched.

    ``tolerance``: relative to the largest logit or key; padding changes the order of the sums in a matrix product.
    """
    cache = engine.runner.cache
    for t in [*cache.k, *cache.v]:  # so that slots nobody owns hold something to be changed
        t.normal_(generator=torch.Generator(t.device).manual_seed(0))
    batch = decode_batch(engine, prompts)
    assert engine.runner.graphs.can_run(BatchShape(batch.num_tokens, len(batch.rows)), True) == bucket
    assert bucket.num_reqs > len(batch.rows)
    before = [t.clone() for t in [*cache.k, *cache.v]]
    plain = run_batch(engine, batch, None)
    written = [t.clone() for t in [*cache.k, *cache.v]]
    for t, saved in zip([*cache.k, *cache.v], before, strict=True):
        t.copy_(saved)
    # What a larger batch left behind must not matter: fill all the padding's fields with its values first.
    engine.runner.buffers.device_bytes.fill_(1)
    padded = run_batch(engine, batch, bucket)
    assert (padded - plain).abs().max() <= tolerance * plain.abs().max()
    assert torch.equal(padded.argmax(-1), plain.argmax(-1))
    bounded = {site.layer for site in engine.runner.sites if site.bounded} if engine.runner.window_reach is not None else set()
    for i, (now, old, want) in enumerate(zip([*cache.k, *cache.v], before, written, strict=True)):
        own = cache.layer_ids[i % len(cache.k)] in bounded  # a layer with page numbers of its own
        live = torch.zeros(now.shape[0] * cache.page_size, dtype=torch.bool, device=plain.device)
        for r in batch.rows:
            pages = r.request.window_pages if own else r.request.pages
            live[pages[r.start // cache.page_size] * cache.page_size + r.start % cache.page_size] = True
        now, old, want = (t.reshape(live.shape[0], -1) for t in (now, old, want))
        assert torch.equal(now[~live], old[~live])
        assert not torch.equal(now[live], old[live])
        assert (now[live] - want[live]).abs().max() <= tolerance * want[live].abs().max()
    for row in batch.rows:
        engine.abort(row.request.request_id)
    engine.step()

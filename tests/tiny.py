"""The model that ships with quire, what transformers' own ``generate`` makes of it, and checks that several tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from graph_runner.engine import Engine
from graph_runner.loading import TINY_MODEL
from graph_runner.request import RequestOutput
from graph_runner.sampling_params import SamplingParams

# Of 1 to 40 tokens, so that a batch has pages and chunks that end at different places.
PROMPTS = (
    "Once upon a time", "The cat", "To make soup, you need",
    "The fox is a small animal. It lives in the forest and it eats mice. One day, the fox saw a rabbit near the river and",
    "Dear Anna,\n", "A", "Tom and Lucy went to the market because",
)
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def load_model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(TINY_MODEL), dtype=dtype).to(device).eval()


def load_tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_MODEL))
    tokenizer.padding_side = "left"
    return tokenizer


def hf_greedy(model: Any, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """The continuation of one prompt by transformers' own ``generate``."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of each output, none of which may have failed."""
    assert not [o.error for o in outputs if o.error]
    return [o.token_ids for o in outputs]


def assert_idle(engine: Engine) -> None:
    """Nothing runs, and every page and slot came back."""
    scheduler = engine.scheduler
    assert not engine.has_unfinished
    assert scheduler.allocator.num_free == scheduler.allocator.num_total
    assert sorted(scheduler._free_slots) == list(range(engine.runner.config.max_num_seqs))
    assert not (engine._requests or engine._texts or engine._inboxes)


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
        "layout": {name: (p.stride(), p.storage_offset(), p.untyped_storage().nbytes()) for name, p in parameters.items()},
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

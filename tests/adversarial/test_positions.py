"""Positions: no sequence's length reaches another, and no model numbers the tokens of a ragged row by itself."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import quire
from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.backend import QuireBackend
from quire.passes.capture.paged_model import PagedModel, find_sites
from quire.passes.options import QuireOptions
from tests.adversarial.mask_cases import ROUTES, Model, outcome
from tests.zoo.configs import REFUSED, SERVED, build
from tests.zoo.harness import TOLERANCE, error, reference, serve

SHORT = 40
PHI3 = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
            num_key_value_heads=2, original_max_position_embeddings=SHORT, max_position_embeddings=160, sliding_window=None,
            rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT,
                             "short_factor": [1.0] * 4, "long_factor": [4.0] * 4})
pytestmark = pytest.mark.skipif(tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18),
                                reason="longrope decides on the host")


def phi3() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Phi3Config(**PHI3)).eval()


class Wrapped(nn.Module):
    """A transformers model in a module that has no config."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.reshape(-1)


REDUCTIONS = {
    "max": lambda m, x, p: x * torch.where(p.max() > 35, 2.0, 1.0),
    "amax": lambda m, x, p: x * torch.where(p.amax(-1, keepdim=True) > 35, 2.0, 1.0)[..., None],
    "torch.max": lambda m, x, p: x * (torch.max(p) + 1).log(),
    "max along": lambda m, x, p: x + p.max(dim=-1).values[:, None, None] * 0.01,
    "sum": lambda m, x, p: x + (p.sum() % 7).float(),
    "any": lambda m, x, p: x * torch.where((p > 35).any(), 2.0, 1.0),
    "all": lambda m, x, p: x * torch.where((p < 35).all(), 2.0, 1.0),
    "argmax": lambda m, x, p: x + p.argmax(-1)[:, None, None] * 0.01,
    "min": lambda m, x, p: x + (p - p.min(-1, keepdim=True).values)[..., None] * 0.01,
}
FINE = {
    "own position": lambda m, x, p: x * (1 + p[..., None] * 0.01),
    "larger of two": lambda m, x, p: x * (1 + torch.maximum(p, p // 2)[..., None] * 0.01),
    "maximum not used": lambda m, x, p: x if p.max() + 1 is None else x,
    "sum not used": lambda m, x, p: x if (torch.arange(x.shape[1]).cumsum(0) + p).float().mean() is not None else -x,
    "over hidden": lambda m, x, p: x - x.amax(-1, keepdim=True),
}


def before(function) -> Model:
    return Model(lambda m, ids, p: None, is_causal=True, before=function)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", [n if n in ("max", "sum") else pytest.param(n, marks=pytest.mark.slow) for n in REDUCTIONS])
def test_reductions_over_positions_are_refused(name: str, route: str) -> None:
    found = outcome(before(REDUCTIONS[name]), route)
    assert found.startswith("refused: ") and "max" not in found.partition("could not be traced")[1]


@pytest.mark.parametrize("name", FINE)
def test_what_keeps_to_each_token_is_exact(name: str) -> None:
    assert outcome(before(FINE[name]), "compile") == "exact"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped, lambda m: Wrapped(Wrapped(m))], ids=["plain", "wrapped", "twice"])
def test_every_config_in_the_module_tree_is_checked(kind: str, wrap) -> None:
    model = phi3() if kind == "longrope" else build(REFUSED["llama_dynamic_rope"])
    with pytest.raises(UnsupportedAttention, match=f"rope_type '{kind}'"):
        PagedModel(wrap(model), QuireOptions(compiler="eager"))


def test_a_nested_config_is_checked() -> None:
    model = build(SERVED["llama"])
    model.config.decoder_config = transformers.Phi3Config(**PHI3)
    with pytest.raises(UnsupportedAttention, match="rope_type 'longrope'"):
        PagedModel(model, QuireOptions(compiler="eager"))


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped], ids=["plain", "wrapped"])
def test_longrope_by_torch_compile_is_refused(wrap) -> None:
    """No length is known, so the choice between the frequencies stays; Dynamo puts it into a graph of its own."""
    model = wrap(phi3())
    backend = QuireBackend(QuireOptions(compiler="eager"))
    options = {} if isinstance(model, Wrapped) else {"use_cache": False}
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(
            input_ids=torch.arange(23)[None], position_ids=torch.arange(23)[None], **options)
    with pytest.raises(UnsupportedAttention, match="mixes the tokens|no attention was found"):
        _ = [g.sites for g in backend.graphs]


def test_longrope_below_its_short_length_is_exact() -> None:
    model = phi3()
    batch = reference(model)
    paged = PagedModel(model, QuireOptions(compiler="eager", max_model_len=SHORT))
    try:
        over_all = [n for n in paged.graph.raised.graph.nodes if n.target in ("max", torch.max) and not n.kwargs]
        assert not over_all, "the frequencies still depend on the batch"
        assert error(serve(paged, batch, page_size=4, attention="torch_native"), batch) <= TOLERANCE
    finally:
        paged.close()


@pytest.mark.parametrize("name, why", [("llama4_temperature", "numbers the tokens of the row itself"),
                                       ("roberta", "table with an entry for padding")])
def test_uncompiled_steps_of_models_with_own_positions_are_refused(name: str, why: str) -> None:
    model = quire.paged(build(SERVED.get(name) or REFUSED[name]))
    cache = quire.PagedKVCache(num_layers=model.config.num_hidden_layers, num_pages=9, page_size=4,
                               num_kv_heads=getattr(model.config, "num_key_value_heads", 4), head_dim=16, dtype=torch.float32,
                               device="cpu")
    meta = quire.CommonAttentionMetadata.build(query_lens=[5, 3], seq_lens=[5, 3], block_table=[[1, 2], [3, 0]], page_size=4)
    with pytest.raises(UnsupportedAttention, match=why), quire.step(cache, meta):
        model(input_ids=torch.arange(8)[None], position_ids=meta.positions[None], use_cache=False)


def test_models_without_own_positions_may_run_uncompiled() -> None:
    assert len(find_sites(build(SERVED["llama"]), uncompiled=True)) == 2

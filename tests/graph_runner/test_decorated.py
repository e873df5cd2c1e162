"""``quire.paged`` as a decorator on a forward: plain outside a step, paged inside, and in an engine."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quire
from quire import Engine, SamplingParams
from tests.steps import serve
from tests.tiny import assert_unchanged, own_greedy, snapshot, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, width))
        return x + self.mlp(x)


def language_model(**options) -> nn.Module:
    """Not a transformers model: it calls F.scaled_dot_product_attention, and its forward is decorated."""

    class MyLM(nn.Module):
        def __init__(self, vocabulary: int = 40, width: int = 32, heads: int = 4) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
            self.head = nn.Linear(width, vocabulary)

        @quire.paged(**options)
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids) + self.positions(position_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return MyLM().eval()


def alone(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one sequence outside a step: the plain forward."""
    with torch.no_grad():
        return model(ids[None], torch.arange(len(ids))[None])[0]


def logits_in_steps(model: nn.Module, ids: torch.Tensor, cuts: list[int], layers: int = 2) -> torch.Tensor:
    """Logits of one sequence, served in steps beside another."""
    heads = model.blocks[0].heads  # a cache as PagedKVCache.for_model makes it, without another trace of the model
    cache = quire.PagedKVCache(num_layers=layers, num_pages=16, page_size=4, num_kv_heads=heads, device="cpu",
                               head_dim=model.head.in_features // heads, dtype=torch.float32)

    def call(tokens: torch.Tensor, meta: quire.CommonAttentionMetadata) -> torch.Tensor:
        with torch.no_grad(), quire.step(cache, meta):
            return model(tokens[None], meta.positions[None])[0]

    return serve(call, [ids, torch.randint(0, 40, (3 * len(cuts),))], [(n, 3) for n in cuts], 4)[0]


@pytest.mark.parametrize("options", [{}, dict(attention="torch_native"), dict(fusions="all")], ids=str)
def test_decorated_forward(options) -> None:
    model = language_model(compiler="eager", **options)
    ids = torch.arange(12)
    want = alone(model, ids)
    assert (logits_in_steps(model, ids, [5, 1, 1, 4, 1]) - want).abs().max() < 1e-5
    assert torch.equal(alone(model, ids), want)
    loss = model(ids[None], torch.arange(12)[None]).sum()
    loss.backward()
    assert model.blocks[0].q.weight.grad is not None


@pytest.mark.parametrize("fusions", ["none", "all"])
def test_two_models_of_one_decorated_class(fusions) -> None:
    """They must not share weights."""
    first = language_model(compiler="eager", fusions=fusions)
    second = type(first)().eval()
    ids = torch.arange(12)
    for model in (first, second, first):
        assert (logits_in_steps(model, ids, [7, 1, 4]) - alone(model, ids)).abs().max() < 1e-5


@pytest.mark.slow
def test_many_models_of_one_decorated_class() -> None:
    """Each has what was compiled for it, and takes it along: Dynamo traces one function at most eight times."""
    cls = type(language_model(compiler="eager"))
    models = [cls(width=8 * n, heads=2).eval() for n in range(1, 11)]
    ids = torch.arange(4)
    for model in models:
        assert (logits_in_steps(model, ids, [3, 1]) - alone(model, ids)).abs().max() < 1e-5
    gone = [weakref.ref(x) for model in models for x in (model, *model.parameters())]
    del model, models
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]


def test_keyword_only_arguments_of_a_decorated_forward() -> None:
    class Scaled(type(language_model(compiler="eager"))):
        @quire.paged(compiler="eager")
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
            x = self.embed(input_ids) + self.positions(position_ids)
            return self.head(self.blocks[0](x)) * scale

    model, ids = Scaled().eval(), torch.arange(4)
    assert (logits_in_steps(model, ids, [4], layers=1) - alone(model, ids)).abs().max() < 1e-5


def test_replaced_parameters_of_a_fused_model() -> None:
    """Fused weights follow updates in place; tensors that were swapped are noticed."""
    model = language_model(compiler="eager", fusions="all")
    ids = torch.arange(12)
    for swap in (lambda p: p.data.mul_(1.5), lambda p: setattr(p, "data", p.detach() * 0.7)):
        logits_in_steps(model, ids, [12])
        swap(model.blocks[1].k.weight)
        assert (logits_in_steps(model, ids, [7, 1, 4]) - alone(model, ids)).abs().max() < 1e-5


@pytest.mark.parametrize("fusions", ["none", "all"])
def test_engine_of_a_decorated_module(fusions) -> None:
    model = language_model(compiler="eager")
    prompts = [[3, 4, 5], [7], list(range(20))]
    expected = [own_greedy(model, p, 10) for p in prompts]
    before = snapshot(model)
    with Engine(model, num_pages=40, page_size=4, max_num_seqs=4, max_model_len=64, fusions=fusions) as engine:
        params = SamplingParams(temperature=0, max_tokens=10)
        assert tokens(engine.generate(prompts, params)) == expected
    assert_unchanged(model, before)


def test_a_function_whose_arguments_have_names() -> None:
    @quire.paged
    def total(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return input_ids + position_ids

    row = torch.ones(1, 3, dtype=torch.int64)
    assert torch.equal(total(input_ids=row, position_ids=row), 2 * row)

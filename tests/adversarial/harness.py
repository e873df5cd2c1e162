"""Small models made to break the proofs, run on every route: each must be exact, or refused, and never served wrongly."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quire
from quire import Step, UnsupportedAttention, step
from quire.attn_ops.kv_cache import PagedKVCache
from quire.passes.capture.paged_model import PagedModel, QuireOptions
from tests.steps import serve

VOCAB, WIDTH, HEADS, DIM, PAGE = 32, 16, 4, 4, 4
#: Largest difference to a forward of each sequence alone, relative to the largest logit: both are float32 (eps 1.2e-7) and
#: differ in the order of sums over up to 32 terms. Tokens that mix change logits by 1e-2 and more.
TOLERANCE = 1e-5
LENGTHS = (5, 9, 4, 7)
#: Tokens that each step schedules of each sequence: prefill in pieces beside decode, and sequences that wait.
STEPS = ((4, 3, 0, 7), (1, 5, 3, 0), (0, 1, 1, 0))
assert tuple(map(sum, zip(*STEPS, strict=True))) == LENGTHS

Mix = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
ROUTES = ("engine", "decorator", "compile")


class Attention(nn.Module):
    """Causal attention by F.scaled_dot_product_attention; with ``mask``, that one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (t.view(*t.shape[:2], HEADS, DIM).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A causal LM of one attention layer with ``mix(model, x, positions)`` behind it, x (1, T, WIDTH)."""

    def __init__(self, mix: Mix | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = mix
        self.embed, self.place, self.attention = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH), Attention()
        self.w, self.head = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Linear(WIDTH, VOCAB)
        self.bias, self.scale = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.point, self.conv = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.group, self.batch = nn.GroupNorm(4, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.randn(64, WIDTH))
        self.batch.running_mean.normal_()  # type: ignore[union-attr]
        self.eval()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        x = x + self.attention(x)
        return self.head(x if self.mix is None else self.mix(self, x, position_ids))


@functools.cache
def decorated(base: type[nn.Module]) -> type[Any]:
    """The class with its forward paged."""
    return type("Decorated", (base,), {"forward": quire.paged(attention="torch_native", compiler="eager")(base.forward)})


def sequences(seed: int = 0, lengths: Sequence[int] = LENGTHS, vocab: int = VOCAB) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


def alone(model: nn.Module, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each sequence run by itself."""
    with torch.no_grad():
        return [logits_of(model(input_ids=i[None], position_ids=torch.arange(len(i))[None]))[0] for i in ids]


def logits_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def cache(layers: int = 1, kv_heads: int | Sequence[int] = HEADS, head_dim: int | Sequence[int] = DIM) -> PagedKVCache:
    return PagedKVCache(num_layers=layers, num_pages=40, page_size=PAGE, num_kv_heads=kv_heads, head_dim=head_dim,
                        dtype=torch.float32, device="cpu")


def by_hand(compiled: nn.Module, kv: PagedKVCache) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """The call of one step, for ``serve``."""
    def call(part: torch.Tensor, meta: Any) -> torch.Tensor:
        with step(kv, meta), torch.no_grad():
            return logits_of(compiled(input_ids=part[None], position_ids=meta.positions[None]))[0]

    return call


@contextlib.contextmanager
def opened(model: nn.Module, route: str, kv: PagedKVCache) -> Iterator[Callable[[torch.Tensor, Any], torch.Tensor]]:
    """The call of one step on a route, for ``serve``: what an engine runs, without its scheduler, or by hand, with ``kv``."""
    torch._dynamo.reset()
    if route == "engine":
        paged = PagedModel(model, QuireOptions(compiler="eager", page_size=PAGE))
        own = PagedKVCache.for_sites(paged.sites, num_pages=40, page_size=PAGE, device="cpu")
        try:
            yield lambda part, meta: paged(Step(own, meta), part, meta.positions, torch.arange(len(part)))
        finally:
            paged.close()
    else:
        compiled = model if route == "decorator" else torch.compile(model, backend="quire", options={"compiler": "eager"})
        yield by_hand(compiled, kv)


def outcome(make: Callable[[type[Any]], nn.Module], route: str, *, base: type[nn.Module] = Model,
            lengths: Sequence[int] = LENGTHS, steps: Sequence[Sequence[int]] = STEPS, vocab: int = VOCAB, layers: int = 1,
            kv_heads: int | Sequence[int] = HEADS, head_dim: int | Sequence[int] = DIM) -> str:
    """What becomes of a model on a route: "exact", or "refused: " and why. ``make`` builds it of the class it is given:
    ``base``, or that decorated.

    Args:
        lengths, steps: of the sequences, and how many tokens of each are in each step.
        layers, kv_heads, head_dim: of the cache, on routes by hand; of all layers, or of each.

    Raises:
        AssertionError: it was served, and logits are wrong.
    """
    ids = sequences(lengths=lengths, vocab=vocab)
    try:
        kind = decorated(base) if route == "decorator" else base
        with opened(make(kind), route, cache(layers, kv_heads, head_dim)) as call:
            got = serve(call, ids, steps, PAGE)
    except Exception as error:
        why = refusal(error)
        if why is None:
            raise
        return f"refused: {why}"
    check_exact(got, alone(make(base), ids))
    return "exact"


def refusal(error: BaseException) -> str | None:
    """Quire's reason, or Dynamo's for code that it cannot trace into one graph; None for any other error, inside quire too."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, UnsupportedAttention):
            return str(at)
        at = getattr(at, "inner_exception", None) or at.__cause__ or at.__context__
    text = str(error)
    if "UnsupportedAttention" in text:
        return text[text.index("UnsupportedAttention") :]
    if isinstance(error, torch._dynamo.exc.TorchDynamoException) and not isinstance(
            error, torch._dynamo.exc.BackendCompilerFailed):
        return re.sub(r"\s+", " ", text)[:300]
    return None


def check_exact(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], what: str = "") -> None:
    scale = max(w[w.isfinite()].abs().max().item() for w in want)
    worst = max((g - w).abs().nan_to_num(nan=float("inf")).max().item() for g, w in zip(got, want, strict=True))
    assert worst <= TOLERANCE * scale, f"served wrongly: off by {worst / scale:.2g} {what}"

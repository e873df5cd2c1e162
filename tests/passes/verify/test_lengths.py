"""Up to which length a trace shows what the model computes. A user loses right answers for long sequences if these fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quire
from quire import UnsupportedAttention
from quire.passes.capture.paged_model import prove_uncompiled
from tests.tiny import small_llama

WIDTH, REACH, VOCAB = 32, 48, 40


class Model(nn.Module):
    """A causal LM of one layer whose matrices, and a stored mask of REACH positions, are square."""

    def __init__(self, scaled: Callable[[torch.Tensor], bool] = lambda x: False,
                 mask: Callable[[Model, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(128, WIDTH)
        self.matrix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("triangle", torch.ones(REACH, REACH).tril().bool())
        self.scaled, self.mask = scaled, mask

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        x = x * 2 if self.scaled(x) else x
        heads = self.matrix(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mask = None if self.mask is None else self.mask(self, position_ids)
        out = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, is_causal=mask is None)
        return self.head(x + out.transpose(1, 2).flatten(2))


#: What ends at a length, and the greatest length before that.
ENDS: dict[str, tuple[Callable[[], Model], int]] = {
    "a path for more tokens than a square matrix has rows": (lambda: Model(lambda x: x.shape[1] > WIDTH), WIDTH),
    "for more numbers than it has": (lambda: Model(lambda x: x.numel() > WIDTH * WIDTH), WIDTH),
    "for one number of tokens": (lambda: Model(lambda x: x.shape[1] == WIDTH + 1), WIDTH),
    "for more tokens than a stored mask has positions": (lambda: Model(lambda x: x.shape[1] > REACH), REACH),
    "a stored mask, cut": (lambda: Model(mask=lambda m, p: m.triangle[: p.shape[1], : p.shape[1]]), REACH),
    "a stored mask, by positions": (lambda: Model(mask=lambda m, p: m.triangle[p[0][:, None], p[0]]), REACH),
}


def engine(model: Model, length: int) -> quire.Engine:
    torch._dynamo.reset()
    return quire.Engine(model.eval(), num_pages=64, page_size=4, max_num_seqs=4, max_model_len=length, compiler="eager",
                        attention="torch_native")


def greedy(model: Model, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ENDS)
def test_an_engine_serves_up_to_that_length(name: str) -> None:
    """And refuses longer sequences: their path is not in the trace, or the model itself cannot run them."""
    make, last = ENDS[name]
    with pytest.raises(UnsupportedAttention, match=f"set max_model_len={last}"):
        engine(make(), last + 1)
    model = make().eval()
    prompts = [[(7 * i + k) % VOCAB for i in range(n)] for k, n in enumerate((last - 4, 5, 20))]
    with engine(model, last) as served:
        outs = served.generate(prompts, quire.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert [list(out.token_ids) for out in outs] == [greedy(model, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("name", ENDS)
def test_explain_names_the_length(name: str) -> None:
    make, last = ENDS[name]
    torch._dynamo.reset()
    found = quire.explain(make().eval())
    assert found.supported and f"sequences of at most {last} tokens" in str(found)
    assert found.as_dict()["longest"] == last


def test_a_longer_step_by_hand_is_refused() -> None:
    """Of a mask that is looked up by positions: nothing in the graph would fail."""
    torch._dynamo.reset()
    model = ENDS["a stored mask, by positions"][0]().eval()
    cache = quire.PagedKVCache.for_model(model, num_pages=32, page_size=4)
    compiled = torch.compile(model, backend="quire", options={"compiler": "eager", "attention": "torch_native"})

    def run(tokens: int) -> torch.Tensor:
        meta = quire.CommonAttentionMetadata.build(query_lens=[tokens], seq_lens=[tokens], block_table=[list(range(1, 20))],
                                                   page_size=4, device="cpu")
        ids = torch.arange(tokens)[None] % VOCAB
        with torch.no_grad(), quire.step(cache, meta):
            return compiled(input_ids=ids, position_ids=meta.positions[None])[0]

    with torch.no_grad():
        want = model(torch.arange(REACH)[None] % VOCAB, torch.arange(REACH)[None])[0]
    torch.testing.assert_close(run(REACH), want, atol=1e-5, rtol=0)  # sums in another order
    with pytest.raises(UnsupportedAttention, match=f"at most {REACH} tokens"):
        run(REACH + 1)


def test_uncompiled_steps_are_refused() -> None:
    """Uncompiled, a model would take its path by the tokens of all sequences of a step."""
    model = small_llama(hidden_size=64)
    assert prove_uncompiled(model).names
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2 if out.shape[1] > 64 else out)
    with pytest.raises(UnsupportedAttention, match="max_model_len=64"):
        prove_uncompiled(model)

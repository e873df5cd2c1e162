"""Log probabilities of tokens: the kernels against their definition, and the definition against log_softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch

from quire.attn_ops.ops import sampling as draw
from quire.attn_ops.ops.logprobs import TokenLogprobs, scaled, token_logprobs, token_logprobs_cuda, token_logprobs_eager
from quire.attn_ops.ops.sampling import BLOCK

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A logit of up to 20 and a normalizer of up to 30 are each rounded in float32 (2e-6 at 30), and so is the sum of V exponentials
# (about 1e-6 of it).
TOLERANCE = 1e-5


def case(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    return logits, tokens, torch.tensor([1.0, 0.0, 0.7, 3.0])[torch.arange(rows) % 4]


def on_device(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(DEVICE) for t in tensors]


def same(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert found.ranks.dtype == torch.int32 and found.ranks.tolist() == expected.ranks.tolist()
    for a, b in ((found.logprobs, expected.logprobs), (found.normalizers, expected.normalizers)):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, vocabulary", [(1, 1), (4, 7), (4, BLOCK), (5, 3 * BLOCK + 333)])
def test_kernel(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits, tokens, temperature = case(rows, vocabulary, dtype)
    same(token_logprobs_cuda(*on_device(logits, tokens, temperature)), token_logprobs_eager(logits, tokens, temperature))
    threshold = logits.float().quantile(0.5, dim=1)
    same(token_logprobs_cuda(*on_device(logits, tokens, temperature, threshold)),
         token_logprobs_eager(logits, tokens, temperature, threshold))


@pytest.mark.parametrize("programs", [1, 5, 13])
def test_kernel_however_rows_are_divided(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "PROGRAMS", programs)
    args = case(2, 12 * BLOCK + 1)
    same(token_logprobs_cuda(*on_device(*args)), token_logprobs_eager(*args))


def test_kernel_with_excluded_tokens_and_views() -> None:
    logits, tokens, temperature = case(4, 3 * BLOCK)
    logits[:, : 2 * BLOCK + 5] = -math.inf  # whole parts of a row
    tokens[0] = 3  # excluded: its log probability is -inf
    tokens[2] = -1  # INVALID_TOKEN reads token 0
    found = token_logprobs_cuda(*on_device(logits, tokens, temperature))
    same(found, token_logprobs_eager(logits, tokens, temperature))
    assert found.logprobs[0] == -math.inf
    wide = torch.cat([logits, logits], dim=1)[:, : 3 * BLOCK]
    same(token_logprobs_cuda(*on_device(wide, tokens, temperature)), token_logprobs_eager(logits, tokens, temperature))


def test_kernel_with_one_temperature_for_all_rows() -> None:
    (logits, tokens, _), one = case(4, 50), torch.ones(())
    logits, spaced, one = on_device(logits, torch.stack([tokens, tokens + 1], 1), one)
    assert logits is not None and spaced is not None and one is not None
    found = token_logprobs_cuda(logits, spaced[:, 0], one.expand(4), -one.expand(4))
    same(found, token_logprobs_eager(logits.cpu(), tokens, torch.ones(4), -torch.ones(4)))


def test_kernel_with_logits_that_are_not_finite() -> None:
    """Beside +inf all others have the log probability -inf; a NaN makes the row's NaN; a row without tokens has none."""
    logits, tokens, temperature = case(4, 2 * BLOCK + 5)
    logits, temperature = logits.repeat(2, 1), torch.full((8,), 0.7)
    tokens = torch.full((8,), BLOCK)
    logits[0, 3] = logits[1, BLOCK] = logits[2, -1] = logits[2, 5] = logits[3, 0] = math.inf
    logits[3, 1] = logits[4, 2] = logits[5, BLOCK] = math.nan
    logits[6] = -math.inf
    found = token_logprobs_cuda(*on_device(logits, tokens, temperature))
    same(found, token_logprobs_eager(logits, tokens, temperature))
    assert found.logprobs[0] == found.logprobs[2] == -math.inf and found.logprobs[1:7].isnan().tolist() == [1, 0, 1, 1, 1, 1]


def test_definition() -> None:
    logits, tokens, temperature = case(8, 5000)
    wanted = temperature > 0
    reference = (logits.double() / temperature.clamp_min(1e-9)[:, None]).log_softmax(-1)
    out = token_logprobs(*on_device(logits, tokens, temperature))
    own = reference.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(out.logprobs.cpu()[wanted].double(), own[wanted], rtol=0, atol=TOLERANCE)
    assert not out.logprobs[~wanted].any() and not out.ranks[~wanted].any() and not out.normalizers[~wanted].any()
    for row in range(8):
        if wanted[row]:
            assert int(out.ranks[row]) == 1 + int((logits[row] > logits[row, tokens[row]]).sum())
    # What is left after a filter is a distribution.
    threshold = logits.quantile(0.9, dim=1)
    found = token_logprobs_eager(logits, logits.argmax(-1), temperature, threshold)
    kept = scaled(logits, temperature.clamp_min(1e-9), threshold) - found.normalizers[:, None]
    torch.testing.assert_close(kept[wanted].exp().sum(-1), torch.ones(int(wanted.sum())), rtol=0, atol=TOLERANCE)
    assert (kept[wanted] > -math.inf).sum(-1).tolist() == [500] * int(wanted.sum())

"""One backend for prefill and another for decoding in an engine on a GPU: graphs for decoding, an eager step for a prompt."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.attn_ops.registry import get_backend
from tests.tiny import GREEDY, PROMPTS, load_model, load_tokenizer, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("name", ["hybrid:flashinfer+triton", "hybrid:torch_native+triton"])
def test_hybrid_engine(name: str) -> None:
    """Steps in graphs go to the part that decodes: the same tokens, bit for bit. Without graphs prompts go through the
    other part, and the first token after a prompt is as likely as the best."""
    if why := get_backend(name).available(torch.device("cuda")):
        pytest.skip(why)
    model, tokenizer = load_model("cuda", torch.float16), load_tokenizer()
    options = dict(max_num_seqs=16, max_model_len=256, num_pages=512)
    found = {}
    for attention in ("triton", name):
        with quire.Engine(model, tokenizer, attention=attention, **options) as engine:
            found[attention] = tokens(engine.generate(list(PROMPTS), GREEDY))
            assert engine.runner.backend.name == attention
    assert found[name] == found["triton"]
    prompt = torch.randint(3, model.config.vocab_size, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    with quire.Engine(model, tokenizer, attention=name, cudagraph_token_sizes=[], **options) as engine:
        (one,) = tokens(engine.generate([prompt], quire.SamplingParams(temperature=0, max_tokens=1)))
    with torch.no_grad():
        logits = model(torch.tensor([prompt], device="cuda")).logits[0, -1].float()
    assert logits[one[0]] >= logits.max() - 0.05  # float16 rounds logits of about 20 to 1/64

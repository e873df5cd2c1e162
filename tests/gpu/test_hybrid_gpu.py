"""One backend for prefill and another for decoding in an engine on a GPU: graphs for decoding, an eager step for a long prompt."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.attn_ops.registry import get_backend
from tests.tiny import GREEDY, PROMPTS, load_model, load_tokenizer, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("name", ["hybrid:flashinfer+triton", "hybrid:torch_native+triton"])
def test_hybrid_engine(name: str) -> None:
    """Short prompts run in graphs, all of them on the part that decodes: the same tokens, bit for bit. A prompt longer than any
    graph goes through the other part, and the first token after it is as likely as the best."""
    if why := get_backend(name).available(torch.device("cuda")):
        pytest.skip(why)
    model, tokenizer = load_model("cuda", torch.float16), load_tokenizer()
    options = dict(max_num_batched_tokens=4096, max_num_seqs=16, max_model_len=2048, num_pages=1024)
    length = min(1800, model.config.max_position_embeddings - 32)
    long = torch.randint(3, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    options["max_model_len"] = min(2048, model.config.max_position_embeddings)
    found = {}
    for attention in ("triton", name):
        with quire.Engine(model, tokenizer, attention=attention, **options) as engine:
            found[attention] = tokens(engine.generate(list(PROMPTS), GREEDY))
            assert engine.runner.backend.name == attention
            (one,) = tokens(engine.generate([long], quire.SamplingParams(temperature=0, max_tokens=1)))
    assert found[name] == found["triton"]
    with torch.no_grad():
        logits = model(torch.tensor([long], device="cuda")).logits[0, -1].float()
    assert logits[one[0]] >= logits.max() - 0.05  # float16 rounds logits of about 20 to 1/64

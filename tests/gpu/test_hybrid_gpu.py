"""One backend for prefill and another for decoding in an engine on a GPU: graphs for decoding, an eager step for a prompt; and
the faster one for long prompts only."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

import quire
from quire.attn_ops import long_prefill
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.conformance.batches import check, lay_out
from quire.attn_ops.registry import get_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning.prefill import PrefillRule, PrefillTime
from tests.attn_ops.cases import check_case, make_case
from tests.gpu.helpers import check_likely, need
from tests.tiny import GREEDY, PROMPTS, load_model, load_tokenizer, tokens

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("name", ["hybrid:triton+flashinfer_mla", "flashinfer_mla", "flashmla"])
def test_latent_cache_engine(name: str) -> None:
    """A whole model on the latent cache of DeepSeek's size, by the packages' kernels: decodes in graphs, prompts and mixed
    steps as the backend allows. Else the pair that "auto" takes from 64 heads on would serve other tokens than the model's."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=64,
        intermediate_size=256, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, q_lora_rank=None,
        first_k_dense_replace=2, max_position_embeddings=512, initializer_range=0.05, tie_word_embeddings=False)
    model = transformers.DeepseekV3ForCausalLM(config).eval().to("cuda", torch.bfloat16)
    prompts = [[3 + (7 * i * n) % 500 for i in range(n)] for n in (5, 70, 1, 129)]
    with quire.Engine(model, attention=need(name), compiler="eager", page_size=64, num_pages=64, max_num_seqs=8,
                      max_model_len=256) as engine:
        assert engine.runner.backend.name == name and all(site.latent is not None for site in engine.runner.sites)
        found = tokens(engine.generate(prompts, quire.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
        assert engine.runner.graphs.stats.replays
    for prompt, one in zip(prompts, found, strict=True):
        check_likely(model, prompt, one)


CUDA = torch.device("cuda")
SITE = AttentionSite(0, 32, 8, 128, 128, torch.bfloat16, 128**-0.5)
BUILD = 300.0  # seconds


def parts() -> list:
    """FlashInfer and Triton, with the kernels for SITE compiled."""
    found = [get_backend(name) for name in ("flashinfer", "triton")]
    if why := next(filter(None, (b.available(CUDA) for b in found)), None):
        pytest.skip(why)
    assert found[0].prefill.ready([SITE], CUDA, BUILD) is None
    return found


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [(32, 32), (16, 8), (32, 8), (32, 4)], ids=str)
def test_long_prompts_are_exact(layout, heads, caplog) -> None:
    """Every prompt through FlashInfer, decodes at the head of the batch through Triton: the kit's bounds, and each new key and
    value at its slot. A site whose kernels are not compiled is Triton's."""
    always = PrefillRule(PrefillTime(0, 0, 0), PrefillTime(1e6, 0, 0))
    backend = long_prefill.make(f"long_{layout}_{heads[0]}_{heads[1]}", *parts(), rule=lambda *args, **where: always)
    shape = dict(num_heads=heads[0], num_kv_heads=heads[1], page_size=16, dtype=torch.bfloat16, device="cuda", layout=layout)
    for query_lens, seq_lens in (([1500], [1500]), ([64, 3], [5000, 2000]), ([1, 1, 1, 300, 1, 64, 2, 129],
                                                                         [4000, 33, 700, 900, 1, 64, 2000, 1129]),
                                 ([1, 4096, 1], [300, 12288, 40])):  # by contiguous keys, from two heads per key head on
        caplog.clear()
        with caplog.at_level(logging.INFO):
            check_case(backend, make_case(query_lens, seq_lens, head_dim=128, poison=float("nan"), **shape))
        assert "prefill kernel for Group" in caplog.text and "decode kernel" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        check_case(backend, make_case([300], [900], head_dim=96, **shape))
    assert "prefill kernel for Group" not in caplog.text


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_long_prompts_of_a_quantized_cache(kv_dtype, caplog) -> None:
    """By copies of the keys as they read back: within the kit's bounds of those."""
    always = PrefillRule(PrefillTime(0, 0, 0), PrefillTime(1e6, 0, 0))
    name = f"long_of_{str(kv_dtype).removeprefix('torch.')}"
    backend = long_prefill.make(name, *parts(), rule=lambda *args, **where: always)
    with caplog.at_level(logging.INFO):
        check(backend, lay_out(SITE, [1, 300, 1, 64], [900, 1300, 40, 64], page_size=16, device=CUDA, kv_dtype=kv_dtype))
    assert "prefill kernel for Group" in caplog.text and "kv_dtype=None" in caplog.text  # not of the quantized cache


def test_auto_serves_long_prompts_by_the_faster_kernels(caplog) -> None:
    """Where both were measured, on an H200: a prompt of 16384 tokens goes through FlashInfer, one of 200 does not; the first
    token after it is as likely as the best."""
    parts()
    if "@long" not in select_backend("auto", [SITE], device=CUDA, page_size=16).backend.name:
        pytest.skip("prefills of both backends are not measured on this device with these versions")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=16640)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    with quire.Engine(model, attention="auto", num_pages=1200, max_num_seqs=8, max_model_len=16640,
                      cudagraph_token_sizes=[512, 8192]) as engine:
        assert "@long" in engine.runner.backend.name
        for length, long in ((200, False), (16384, True)):
            caplog.clear()
            prompt = torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            with caplog.at_level(logging.INFO):
                (one,) = tokens(engine.generate([prompt], quire.SamplingParams(temperature=0, max_tokens=1)))
            assert ("prefill kernel for Group" in caplog.text) == long
            with torch.no_grad():
                logits = model(torch.tensor([prompt], device="cuda"), logits_to_keep=1).logits[0, -1].float()
            assert logits[one[0]] >= logits.max() - 0.1  # bfloat16 rounds logits of about 4 to 1/64; 16 layers

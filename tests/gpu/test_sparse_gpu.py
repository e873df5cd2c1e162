"""Approximate attention on a GPU: kernels against their definitions, and engines with CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backends import double_sparsity
from quire.attn_ops.backends.dual_chunk import vertical_slash
from quire.attn_ops.conformance.batches import lay_out, run
from quire.graph_runner.loading import TINY_MODEL


def test_label_kernels_choose_as_their_definition() -> None:
    """Few of many keys, past one block of scores and one split: the same outputs, from the same keys."""
    site = AttentionSite(layer=0, num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, dtype=torch.float32, scale=0.09)
    ranked = {0: [torch.randperm(128, generator=torch.Generator().manual_seed(h)).tolist() for h in range(8)]}
    options = double_sparsity.Options(300, 700, 16, ranked)
    lens = [1, 700, 701, 5000]
    out = []
    for name, decode in (("eager", double_sparsity.decode_eager), ("kernels", double_sparsity.decode_triton)):
        backend = double_sparsity.backend(f"double_sparsity:{name}", options, decode)
        out.append(run(backend, lay_out(site, [1] * 4, lens, page_size=16, device="cuda", pad=(2, 2))))
    torch.testing.assert_close(out[1], out[0], atol=1e-4, rtol=0)  # scores near the last chosen may change places


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])  # a weight and an output rounded
@pytest.mark.parametrize("dim, first_query, first_key, keys", [(128, 0, 0, 3000), (128, 1777, 300, 1200), (256, 130, 0, 131)])
def test_the_kernel_of_sparse_prefills_sees_what_its_definition_does(dtype, error, dim, first_query, first_key, keys) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(n, h, dim, dtype=dtype, device="cuda", generator=generator)
               for n, h in ((min(1000, 3000 - first_query), 8), (keys, 2), (keys, 2)))
    weights = torch.rand(2, 8, 3000, device="cuda", generator=generator)
    lines = vertical_slash.choose_lines(*weights, [40, 200, 31, 3000] * 2, [101, 130, 1500, 1] * 2)
    listed = vertical_slash.Listed.of(lines, vertical_slash.kernel_block(q, dim))
    found = vertical_slash.attend_triton(q, k, v, first_query, first_key, lines, scale=0.1, softcap=None, listed=listed)
    wanted = vertical_slash.attend_eager(q, k, v, first_query, first_key, lines, scale=0.1, softcap=None)
    torch.testing.assert_close(found[0], wanted[0], atol=error, rtol=0)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["double_sparsity:2048:0:all", "dual_chunk:1024:128"])
def test_engines_are_exact_where_backends_say_so(name: str) -> None:
    params = quire.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 40, 200)]
    found = []
    for attention in ("torch_native", name):
        with quire.Engine(TINY_MODEL, attention=attention, max_num_seqs=4) as engine:
            found.append([[(t, p[t].logprob) for t, p in zip(o.token_ids, o.logprobs, strict=True)]
                          for o in engine.generate(prompts, params)])
    for dense, other in zip(*found, strict=True):
        assert [t for t, _ in dense] == [t for t, _ in other]
        assert max(abs(a - b) for (_, a), (_, b) in zip(dense, other, strict=True)) < 1e-3


@pytest.mark.parametrize("name", ["double_sparsity:16:0:all", "dual_chunk:64:16", "dual_chunk:64:16:32:16:40:104"])
def test_engines_decode_as_on_a_cpu(name: str) -> None:
    """Beyond the exact lengths too: the tokens of the plain PyTorch implementation, from the first on."""
    params = quire.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    ids, found = list(range(5, 165)), []
    from quire.graph_runner.loading import load

    for device in ("cpu", "cuda"):
        model, _ = load(TINY_MODEL, None)
        options = dict(attention=name, page_size=16, max_num_seqs=4, enable_prefix_caching=False)
        with quire.Engine(model.to(device), **options) as engine:
            (output,) = engine.generate([{"prompt_token_ids": ids}], params)
        found.append(torch.tensor([p[t].logprob for t, p in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]))
    torch.testing.assert_close(found[1], found[0], atol=5e-3, rtol=0)

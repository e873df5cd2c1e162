"""Approximate attention on a GPU: kernels against their definitions, and engines with CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backends import double_sparsity
from quire.attn_ops.backends.double_sparsity import (
    LayerLabels,
    Options,
    choose_eager,
    choose_triton,
    decode_eager,
    decode_triton,
    labels_of,
)
from quire.attn_ops.backends.dual_chunk import decode_by_chunk, vertical_slash
from quire.attn_ops.backends.dual_chunk.divide import gathered
from quire.attn_ops.conformance.batches import lay_out, planned, prepared, run
from quire.attn_ops.kernels.host import Rope
from quire.attn_ops.ops.rope import PLAIN, norm_and_rotate
from quire.graph_runner.loading import TINY_MODEL
from tests.gpu.helpers import captured


def test_label_kernels_choose_as_their_definition() -> None:
    """Few of many keys, past one block of scores and one split: the same outputs, from the same keys."""
    site = AttentionSite(layer=0, num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, dtype=torch.float32, scale=0.09)
    ranked = {0: [torch.randperm(128, generator=torch.Generator().manual_seed(h)).tolist() for h in range(8)]}
    options = Options(300, 700, 16, ranked)
    lens = [1, 700, 701, 5000]
    out = []
    for name, decode in (("eager", decode_eager), ("kernels", decode_triton)):
        backend = double_sparsity.backend(f"double_sparsity:{name}", options, decode)
        out.append(run(backend, lay_out(site, [1] * 4, lens, page_size=16, device="cuda", pad=(2, 2))))
    torch.testing.assert_close(out[1], out[0], atol=1e-4, rtol=0)  # scores near the last chosen may change places


@pytest.mark.parametrize("channels", [16, 128])
@pytest.mark.parametrize("dtype, group, picked, longest", [
    (torch.bfloat16, 4, 2048, 33000), (torch.float16, 8, 2047, 9000), (torch.float32, 1, 300, 70000),
    (torch.bfloat16, 5, 1, 5000), (torch.bfloat16, 16, 4096, 131072)])
def test_kernels_choose_among_many_keys_as_their_definition(dtype, group, picked, longest, channels) -> None:
    """Labels of small whole numbers: scores are exact, and many are equal, of which the first are chosen."""
    kv_heads, page_size, device = 2, 16, torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    lens = torch.tensor([longest, picked, picked + 1, 0, longest // 2 + 3], dtype=torch.int32, device=device)
    width = -(-longest // page_size)
    keys, values = (torch.randn(1 + width * len(lens), page_size, kv_heads, 128, device=device, generator=generator).to(dtype)
                    for _ in range(2))
    keys.mul_(2).round_()
    q = torch.randn(len(lens), kv_heads * group, 128, device=device, generator=generator).mul(2).round().to(dtype)
    table = (1 + torch.randperm(width * len(lens), device=device, generator=generator)).view(len(lens), -1).int()
    chosen = torch.stack([torch.randperm(128, device=device, generator=generator)[:channels] for _ in range(kv_heads)])
    layer = LayerLabels(torch.zeros(*keys.shape[:3], channels, dtype=dtype, device=device), chosen.int(), True)
    layer.store(keys, torch.arange(-1, keys.shape[0] * page_size, device=device))
    assert torch.equal(layer.labels[1:], labels_of(keys, chosen)[1:])
    options = Options(picked, 0, channels)
    for row in range(len(lens)):  # the definition of one sequence at a time: it copies all labels
        one = (slice(row, row + 1), layer, table[row : row + 1], lens[row : row + 1], options)
        if lens[row] > picked:
            positions, keep = choose_eager(q[one[0]], *one[1:])
            wanted = positions[keep].view(q.shape[1], -1).sort().values
            assert torch.equal(choose_triton(q[one[0]], *one[1:])[0].sort().values.long(), wanted)
    found = decode_triton(q, keys, values, layer, table, lens, options, 0.02, None)
    for row in range(len(lens)):
        wanted = decode_eager(q[row : row + 1], keys, values, layer, table[row : row + 1], lens[row : row + 1], options, 0.02,
                              None)
        # Rounded to the dtype: the weights, of at most 1, and the output, of at most 5.
        torch.testing.assert_close(found[row : row + 1], wanted, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=0)


def test_labels_of_a_copied_cache_in_a_graph() -> None:
    """Whole keys as labels, of a cache that the state has not seen: nothing comes from the host while a graph is captured."""
    site = AttentionSite(layer=0, num_heads=8, num_kv_heads=2, head_dim=64, head_dim_v=64, dtype=torch.bfloat16, scale=0.1)
    backend = double_sparsity.backend("double_sparsity:graph", Options(64, 0))
    batch = lay_out(site, [1, 1], [500, 40], page_size=16, device="cuda", expect=False)
    with planned(backend, batch, graph_key="graph", capturing=True):
        given = prepared(backend, batch)
        copy = [None if t is None else t.clone() for t in batch.cache.of_layer(0)]

        def call() -> torch.Tensor:
            return backend.op(batch.q, batch.k, batch.v, *copy, *batch.tables, None, given, **batch.options)

        eager = call()
        graph, out = captured(call)
        graph.replay()
        torch.testing.assert_close(out, eager, atol=0, rtol=0)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype, group, dim, error", [  # of bfloat16: a weight and an output rounded
    (torch.bfloat16, 4, 128, 2e-2), (torch.bfloat16, 7, 256, 2e-2), (torch.float32, 40, 64, 1e-4)])
def test_decoding_by_chunks_is_the_scheme(dtype, group: int, dim: int, error: float, rows: int) -> None:
    """32768 tokens and less, some below CHUNK; a chunk's length that is no multiple of a block."""
    kv_heads, chunk, length, page_size, device = 2, 8192, 7001, 16, torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    lens = [32768, 100, 8192, 8193, 8192 + 7001, 8193 + 7001, 31337, 1][:rows]
    pages = 1 + 2048 * rows
    k_cache, v_cache = (torch.randn(pages, page_size, kv_heads, dim, device=device, generator=generator).to(dtype)
                        for _ in range(2))
    table = (1 + torch.randperm(pages - 1, device=device, generator=generator)).view(rows, -1).int()
    q = torch.randn(rows + 1, kv_heads * group, dim, device=device, generator=generator).to(dtype)  # one padding token
    angles = torch.arange(32768, device=device)[:, None] * 10.0 ** -torch.linspace(0, 4, dim // 2, device=device)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def at(query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return norm_and_rotate(query, None, cos[positions], sin[positions], 0.0, PLAIN)

    turned = at(q, torch.tensor([*(n - 1 for n in lens), 0], device=device)).contiguous()
    marks = torch.arange(chunk, 32768, length, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    found = decode_by_chunk(q, turned, Rope.of(cos[marks], sin[marks], None, None, 0.0), PLAIN, k_cache, v_cache, table, starts,
                            torch.tensor(lens, dtype=torch.int32, device=device), 32768, chunk, length, dim**-0.5, None)
    for row, total in enumerate(lens):
        position = torch.arange(total, device=device)
        keys, values = (gathered(c, table, row, position).float() for c in (k_cache, v_cache))
        places = (chunk + position // length * length).clamp_max(total - 1)  # of the query, for each key
        scores = torch.empty(q.shape[1], total, device=device)
        for place in places.unique():
            query = at(q[row : row + 1], place[None])[0].float().view(kv_heads, group, dim)
            scores[:, places == place] = dim**-0.5 * (query @ keys[places == place].permute(1, 2, 0)).flatten(0, 1)
        wanted = (scores.softmax(-1).view(kv_heads, group, total) @ values.transpose(0, 1)).flatten(0, 1)
        torch.testing.assert_close(found[row].float(), wanted, atol=error, rtol=0)
    assert not found[rows:].any()


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
        with quire.Engine(TINY_MODEL, attention=attention, max_num_seqs=4, num_pages=100) as engine:
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
        options = dict(attention=name, page_size=16, num_pages=100, max_num_seqs=4, enable_prefix_caching=False)
        with quire.Engine(model.to(device), **options) as engine:
            (output,) = engine.generate([{"prompt_token_ids": ids}], params)
        found.append(torch.tensor([p[t].logprob for t, p in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]))
    torch.testing.assert_close(found[1], found[0], atol=5e-3, rtol=0)

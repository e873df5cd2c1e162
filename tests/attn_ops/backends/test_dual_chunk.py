"""Backend ``dual_chunk``: the scheme's own positions against an oracle, exact below a chunk, and what refuses it."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

import quire
from quire import AttentionSite, UnsupportedAttention
from quire.attn_ops.backends import dual_chunk as module
from quire.attn_ops.backends.dual_chunk import vertical_slash
from quire.attn_ops.backends.dual_chunk.divide import divide, far_chunks, gathered
from quire.attn_ops.backends.dual_chunk.vertical_slash import Sparse
from quire.attn_ops.kernels.host import Rope
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.rope import RopeForm, norm_and_rotate, rotate
from quire.attn_ops.registry import get_backend
from quire.attn_ops.step import Step, ensure_planned, running
from tests.attn_ops.cases import FEW, pass_kit
from tests.attn_ops.oracle import oracle_attention
from tests.steps import ragged
from tests.tiny import small_llama

SITE = AttentionSite(layer=0, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.float32, scale=0.25)
CHUNK, LOCAL = 12, 4
LENGTH = CHUNK - LOCAL
LENS = (50, 9, 33)
STEPS = ((20, 9, 13), (29, 0, 0), (1, 0, 1), (0, 0, 19))  # prefill in parts, decode, and both together


def tables(positions: torch.Tensor, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, dim) of positions (T,)."""
    angles = positions[:, None] * 10.0 ** -torch.arange(0, 2, 4 / dim, dtype=torch.float64)
    return tuple(f(angles).repeat(1, 2).float() for f in (torch.cos, torch.sin))  # type: ignore[return-value]


def dual_chunk_oracle(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """One sequence, unrotated q (L, H, D), keys and values (L, Hkv, D): three kinds of positions, as the paper has them. Keys
    stand at their place in their chunk; a query there, behind it by a chunk but at most at CHUNK, or at CHUNK."""
    out = torch.zeros(len(q), q.shape[1], values.shape[2], dtype=torch.float64)
    key_place = torch.arange(len(q)) % LENGTH
    placed = rotate(keys, *tables(key_place))
    for p in range(len(q)):
        chunk, place = p // LENGTH, p % LENGTH
        for head in range(q.shape[1]):
            scores = []
            for j in range(p + 1):
                behind = chunk - j // LENGTH
                at = place if behind == 0 else min(place + LENGTH, CHUNK) if behind == 1 else CHUNK
                query = rotate(q[p : p + 1, head : head + 1], *tables(torch.tensor([at])))[0, 0]
                scores.append(query.double() @ placed[j, head // 2].double() * SITE.scale)
            logits = torch.stack(scores)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            out[p, head] = torch.softmax(logits, 0) @ values[: p + 1, head // 2].double()
    return out


def attend(backend, cache, meta, q, k, v, turned=None, softcap=None) -> torch.Tensor:
    """One step, by ``rope_op`` and the tables ``turned``; without them q and k are rotated already."""
    step = Step(cache, meta, attention=backend)
    op, rope = (backend.op, ()) if turned is None else (backend.rope_op, (*turned, None, None, 0.0))
    with running(step):
        ensure_planned(step, backend, [SITE])
        return op(q, k, v, *rope, *cache.of_layer(0), meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc,
                  meta.seq_lens, None, [], scale=SITE.scale, window=None, softcap=softcap, chunk=None)


def served(backend, sequences, steps=STEPS, softcap=None) -> list[torch.Tensor]:
    """Outputs (L, H, D) of each sequence (q, k, v), through ``rope_op`` in these steps, with one cache."""
    ids = [torch.arange(len(q)) for q, _, _ in sequences]
    cache = PagedKVCache.for_sites([SITE], num_pages=600, page_size=4, device="cpu")
    out = [torch.zeros(*q.shape[:2], 16) for q, _, _ in sequences]
    for places, meta, rows in ragged(ids, steps, 4):
        starts = meta.query_start_loc.tolist()
        parts = [places[a:b] for a, b in zip(starts, starts[1:], strict=False)]
        q, k, v = (torch.cat([sequences[r][i][part] for r, part in zip(rows, parts, strict=True)]) for i in range(3))
        found = attend(backend, cache, meta, q, k, v, tables(places), softcap)
        for r, part, result in zip(rows, parts, found.split([len(p) for p in parts]), strict=True):
            out[r][part] = result
    return out


def random_sequences(lens=LENS):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(n, h, 16, generator=generator) for h in (4, 2, 2)) for n in lens]


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("softcap", [None, pytest.param(4.0, marks=pytest.mark.slow)])
def test_positions_are_those_of_the_scheme(softcap: float | None, use_kernel: bool) -> None:
    steps = (*STEPS, (0, 0, 1), (1, 1, 1), (0, 1, 0)) if use_kernel else STEPS
    sequences = random_sequences([sum(counts) for counts in zip(*steps, strict=True)])
    found = served(module.backend("dual_chunk:test", CHUNK, LENGTH, use_kernel=use_kernel), sequences, steps, softcap)
    for out, sequence in zip(found, sequences, strict=True):
        torch.testing.assert_close(out.double(), dual_chunk_oracle(*sequence, softcap), atol=3e-5, rtol=0)


def far_oracle(q, turned, tables_of, form, norm, keys, values, chunk: int, length: int, scale: float, softcap: float | None
               ) -> torch.Tensor:
    """The last of the rotated ``keys`` (N, Hkv, D) is the token's own: q (H, D), one loop a key; ``turned`` for near keys."""
    out = torch.zeros(q.shape[0], values.shape[2], dtype=torch.float64)
    for head in range(len(q)):
        kv_head, logits = head // (len(q) // keys.shape[1]), []
        for j, key in enumerate(keys[:, kv_head].double()):
            at, query = chunk + j // length * length, turned[head]
            if at < len(keys):
                cos, sin = tables_of(torch.tensor([at]))
                query = norm_and_rotate(q[None, head, None], norm, cos, sin, 1e-6, form)[0, 0]
            logits.append(query.double() @ key * scale)
        scores = torch.stack(logits)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        out[head] = torch.softmax(scores, 0) @ values[:, kv_head].double()
    return out


@pytest.mark.parametrize(("seed", "dtype"), [
    pytest.param(seed, dtype, marks=[pytest.mark.slow] * ((seed, dtype) not in ((5, torch.float32), (1, torch.float16))))
    for seed in range(16) for dtype in (torch.float32, torch.float16)])
def test_the_decode_kernel_is_the_scheme(seed: int, dtype: torch.dtype, monkeypatch) -> None:
    """Any group, head dims, form of the rotary embedding, page size, and chunks that are no multiple of a block; sequences
    below and beyond CHUNK together, a sequence without queries, and padding tokens."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group, page_size = choose.randint(1, 3), choose.choice([1, 2, 3, 4, 7, 8, 40]), choose.choice([1, 3, 4, 16])
    dim, dim_v, heads = choose.choice([8, 16, 24]), choose.choice([8, 16, 20]), kv_heads * group
    chunk = choose.randint(4, 40)
    length = chunk - choose.randint(1, chunk // 2)
    norm = (1 + torch.rand(dim, generator=generator)).to(dtype) if choose.random() < 0.5 else None
    form = RopeForm(interleaved=choose.random() < 0.5, half_tables=choose.random() < 0.5,
                    norm_after=norm is not None and choose.random() < 0.5,
                    norm_offset=choose.choice([None, 1.0]) if norm is not None else None)
    lens, counts = [choose.randint(chunk + 1, 150), 1, chunk, 77, chunk + 1], [1, 1, 1, 0, 1]
    monkeypatch.setattr(module, "LONGEST_SPLIT", choose.choice([16, 48, 2048]))

    pairs = choose.choice([dim // 2, dim // 2 - 2])

    def tables_of(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * 10.0 ** -torch.linspace(0, 2, pairs, dtype=torch.float64)
        if not form.half_tables:
            angles = angles.repeat_interleave(2, 1) if form.interleaved else angles.repeat(1, 2)
        return angles.cos().float(), angles.sin().float()

    width = -(-150 // page_size)
    pages = 1 + width * len(lens)
    k_cache, v_cache = (torch.randn(pages, kv_heads, page_size, d, generator=generator).to(dtype).transpose(1, 2)
                        for d in (dim, dim_v))
    table = (1 + torch.randperm(pages - 1, generator=generator)).view(len(lens), -1).int()
    q = torch.randn(sum(counts) + 2, 2 * heads, dim, generator=generator).to(dtype)[:, ::2]  # strided; two padding tokens
    own = torch.tensor([n - 1 for n, count in zip(lens, counts, strict=True) if count] + [0, 0])
    turned = norm_and_rotate(q, norm, *tables_of(own), 1e-6, form).contiguous()
    longest = max(n for n, count in zip(lens, counts, strict=True) if count)
    positions = chunk + length * torch.arange(far_chunks(longest, chunk, length))
    softcap = choose.choice([None, 3.0])
    found = module.decode_by_chunk(
        q, turned, Rope.of(*tables_of(positions), norm, None, 1e-6), form, k_cache, v_cache, table,
        torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(lens, dtype=torch.int32), longest, chunk, length, 0.3, softcap)
    token = 0
    for row, (total, count) in enumerate(zip(lens, counts, strict=True)):
        if count:
            position = torch.arange(total)
            keys, values = (gathered(c, table, row, position) for c in (k_cache, v_cache))
            wanted = far_oracle(q[token], turned[token], tables_of, form, norm, keys, values, chunk, length, 0.3, softcap)
            # In float16 queries are rounded, by 2^-11 of at most 12, and logits are products of 24 of them with keys.
            torch.testing.assert_close(found[token].double(), wanted, atol=5e-5 if dtype == torch.float32 else 3e-2, rtol=0)
            token += 1
    assert not found[token:].any()


@pytest.mark.parametrize("use_kernel", [False, True])
def test_a_broken_key_is_not_lost_when_parts_are_merged(use_kernel: bool) -> None:
    """A far key and a near one: queries from there on have no result, for the heads that read it."""
    for at in (3, 48):
        (q, k, v), = sequences = random_sequences((52,))
        k[at, 1] = float("nan")
        backend = module.backend("dual_chunk:test", CHUNK, LENGTH, use_kernel=use_kernel)
        (found,) = served(backend, sequences, ((50,), (1,), (1,)))
        assert found[at:, 2:].isnan().all() and found[:at].isfinite().all() and found[:, :2].isfinite().all()


@FEW
def test_it_passes_the_kit_below_a_chunk(only: str) -> None:
    pass_kit(module.backend("dual_chunk:kit", 1 << 20, 1 << 19), only)


def test_a_needle_is_found_far_away() -> None:
    """A key that fits the query of the last of 340 tokens, 328 back: there the rotation hides it, at the scheme's place not."""
    (q, k, v), = sequences = random_sequences((340,))
    q[-1], k[:, :, 6::8], v[11] = 0.0, 0.0, 50.0
    q[-1, :, 6], k[11, :, 6] = 16.0, 16.0  # a pair that turns by 0.0316 a token: by 10.4 in 328, by 0.28 in CHUNK - 3
    (found,) = served(module.backend("dual_chunk:test", CHUNK, LENGTH), sequences, ((339,), (1,)))
    turned = [rotate(x, *tables(torch.arange(340))) for x in (q, k)]
    full = oracle_attention(turned[0][-1:], turned[1], v, scale=SITE.scale)
    assert (found[-1] > 45).all() and (full[-1].abs() < 5).all()


@pytest.mark.slow
def test_a_model_runs_with_it() -> None:
    """Through an engine: the model's own log probabilities below a chunk, others beyond it."""
    from quire.graph_runner.loading import TINY_MODEL, load

    model, _ = load(TINY_MODEL, None)
    prompt = list(range(5, 45))
    params = quire.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    error = {}
    for name in ("dual_chunk:64:16", "dual_chunk:8:4"):
        with quire.Engine(model, attention=name, compiler="eager") as engine:
            (output,) = engine.generate([{"prompt_token_ids": prompt}], params)
        ids = [*prompt, *output.token_ids]
        with torch.no_grad():
            own = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = torch.tensor([p[t].logprob for t, p in zip(output.token_ids, output.logprobs, strict=True)])
        error[name] = (found - own[range(8), list(output.token_ids)]).abs().max().item()
    assert error["dual_chunk:64:16"] < 1e-4  # float32 sums in another order
    assert error["dual_chunk:8:4"] > 1e-2


def test_a_long_sequence_without_queries_does_not_count() -> None:
    """A row of the batch that has nothing to do in this step, however long."""
    batch = divide([0, 2], [50, 5], CHUNK, LENGTH, torch.device("cpu"))
    assert batch.longest == 5 and not batch.far and not batch.passing


def test_what_is_refused() -> None:
    for name in ("dual_chunk", "dual_chunk:8", "dual_chunk:8:x", "dual_chunk:8:5"):
        with pytest.raises(ValueError, match="write dual_chunk:CHUNK:LOCAL"):
            get_backend(name)
    backend = get_backend("dual_chunk:8:4")
    assert backend.priority is None and "more than 8 tokens" in backend.approximate
    meta = quire.CommonAttentionMetadata.build([9], [9], [[1, 2, 3]], page_size=4)
    cache = PagedKVCache.for_sites([SITE], num_pages=5, page_size=4, device="cpu")
    with pytest.raises(UnsupportedAttention, match="9 tokens and cannot rotate q.*served up to 8"):
        attend(backend, cache, meta, *random_sequences((9,))[0])
    # Its keys are in the cache, but the rotary embeddings that far chunks need are not known.
    backend = get_backend("dual_chunk:8:4")
    cache = PagedKVCache.for_sites([SITE], num_pages=9, page_size=4, device="cpu")
    meta = quire.CommonAttentionMetadata.build([1], [30], [list(range(1, 9))], page_size=4)
    with pytest.raises(RuntimeError, match="no token at position 8 has passed"):
        attend(backend, cache, meta, *random_sequences((1,))[0], tables(torch.tensor([29])))
    # longrope's depend on the length of a sequence: the embedding of one would be used for another, and be wrong.
    backend = module.backend("dual_chunk:test", CHUNK, LENGTH)
    cache = PagedKVCache.for_sites([SITE], num_pages=20, page_size=4, device="cpu")
    sequence, positions = random_sequences((20,))[0], torch.arange(20)
    first, second, third = (quire.CommonAttentionMetadata.build([20], [20], [list(range(i, i + 5))], page_size=4)
                            for i in (1, 6, 11))
    for meta in (first, second):
        attend(backend, cache, meta, *sequence, tables(positions))
    with pytest.raises(UnsupportedAttention, match="different rotary embeddings at position 12"):
        attend(backend, cache, third, *sequence, tables(2.0 * positions))


# -- sparse prefill ---------------------------------------------------------------------------------------------------


def sparse_oracle(q, keys, values, sizes, last: int, softcap: float | None = None) -> torch.Tensor:
    """One sequence in one prefill, unrotated q (L, H, D), keys and values (L, Hkv, D): weights of the last queries, summed by
    key and by distance; then softmax over the chosen ones; one loop each."""
    total, heads = len(q), q.shape[1]
    turned = rotate(keys, *tables(torch.arange(total)))
    logits = torch.full((heads, total, total), float("-inf"), dtype=torch.float64)
    for p in range(total):
        at = (CHUNK + torch.arange(p + 1) // LENGTH * LENGTH).clamp_max(p)
        query = rotate(q[p].expand(p + 1, -1, -1), *tables(at)).double()
        logits[:, p, : p + 1] = (query * turned[: p + 1].double().repeat_interleave(2, 1)).sum(-1).T * SITE.scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap).masked_fill(logits == float("-inf"), float("-inf"))
    weights = torch.softmax(logits[:, -last:], -1)
    out = torch.zeros(total, heads, values.shape[2], dtype=torch.float64)
    for head, (vertical, slash) in enumerate(sizes):
        by_key, by_distance = weights[head].sum(0), torch.zeros(total, dtype=torch.float64)
        for i, p in enumerate(range(total - min(last, total), total)):
            for j in range(p + 1):
                by_distance[p - j] += weights[head, i, j]
        by_key[: vertical_slash.KEEP_FIRST] += 1e6
        by_distance[: vertical_slash.KEEP_NEAR] += 1e6
        by_key[: vertical_slash.KEEP_FIRST] -= torch.arange(min(total, vertical_slash.KEEP_FIRST))
        by_distance[: vertical_slash.KEEP_NEAR] -= torch.arange(min(total, vertical_slash.KEEP_NEAR))
        chosen = set(by_key.topk(min(vertical, total)).indices.tolist())
        apart = set(by_distance.topk(min(slash, total)).indices.tolist())
        for p in range(total):
            seen = [j for j in range(p + 1) if j in chosen or p - j in apart]
            out[p, head] = torch.softmax(logits[head, p, seen], 0) @ values[seen, head // 2].double()
    return out


ALL = [(999, 999)] * 4
SIZES = [(9, 8), (6, 11), (30, 1), (1, 12)]


def sparse_backend(sizes=SIZES, dense_below: int = 20, last: int = 6, use_kernel: bool = False, chunk: int = CHUNK):
    return module.backend("dual_chunk:test", chunk, chunk - LOCAL, Sparse(dense_below, last, {0: sizes}), use_kernel)


@pytest.fixture
def few_forced(monkeypatch):
    """Fewer keys and distances that are always chosen, for short sequences."""
    monkeypatch.setattr(vertical_slash, "KEEP_FIRST", 2)
    monkeypatch.setattr(vertical_slash, "KEEP_NEAR", 3)


@pytest.mark.parametrize("use_kernel, softcap", [(False, None), (True, 4.0)])
def test_the_last_queries_choose_keys_and_distances(few_forced, use_kernel: bool, softcap: float | None) -> None:
    """A sparse prefill over several chunks, beside a dense one, and the token decoded after it, which sees all."""
    sequences = random_sequences((71, 19))
    found = served(sparse_backend(use_kernel=use_kernel), sequences, ((70, 19), (1, 0)), softcap=softcap)
    wanted = sparse_oracle(*(x[:70] for x in sequences[0]), SIZES, 6, softcap)
    dense, short = (sparse_oracle(*sequence, ALL, 6, softcap) for sequence in sequences)
    torch.testing.assert_close(found[0][:70].double(), wanted, atol=3e-5, rtol=0)
    assert (wanted - dense[:70]).abs().max() > 0.1, "nothing was left out"
    torch.testing.assert_close(found[0][70:].double(), dense[70:], atol=3e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), short, atol=3e-5, rtol=0)


@pytest.mark.parametrize("sizes", [[(90, 1)] * 4, [(1, 90)] * 4])
@pytest.mark.parametrize("use_kernel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lines_that_cover_everything_leave_nothing_out(few_forced, sizes, use_kernel: bool) -> None:
    """All keys, or all distances; in parts, whose first ones are dense."""
    sequences = random_sequences((80,))
    (found,) = served(sparse_backend(sizes, use_kernel=use_kernel), sequences, ((20,), (31,), (28,), (1,)))
    torch.testing.assert_close(found.double(), sparse_oracle(*sequences[0], ALL, 6), atol=3e-5, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_key_of_a_sparse_prefill_leaves_no_lse(bad: float) -> None:
    """Where it is seen: as a listed key of one head, or at a chosen distance; in the kernel as in the definition."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(70, heads, 16, generator=generator) for heads in (4, 2, 2))
    k[[9, 30], 1] = bad
    lines = vertical_slash.Lines(*(torch.rand(4, 70, generator=generator) < 0.2 for _ in range(2)))
    listed = vertical_slash.Listed.of(lines, vertical_slash.kernel_block(q, 16))
    expected = vertical_slash.attend_eager(q, k, v, 0, 0, lines, scale=0.25, softcap=None)
    found = vertical_slash.attend_triton(q, k, v, 0, 0, lines, scale=0.25, softcap=None, listed=listed)
    assert expected[1][9:, 2:].isnan().any() and expected[1][:, :2].isfinite().any()
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_queries_that_are_rotated_already_are_sparse_below_a_chunk() -> None:
    """A layer whose rotary embedding is not found: the same outputs, up to CHUNK tokens."""
    (q, k, v), = random_sequences((150,))
    q, k = (rotate(x, *tables(torch.arange(150))) for x in (q, k))
    backend = sparse_backend([(31, 101)] * 4, chunk=200)
    cache = PagedKVCache.for_sites([SITE], num_pages=40, page_size=4, device="cpu")
    meta = quire.CommonAttentionMetadata.build([150], [150], [list(range(1, 39))], page_size=4)
    found = attend(backend, cache, meta, q, k, v)
    full = oracle_attention(q, k, v, scale=SITE.scale)
    near = slice(0, 101)  # the nearest 100 distances and the first 30 keys are always chosen
    torch.testing.assert_close(found[near].double(), full[near], atol=2e-5, rtol=0)
    assert (found.double() - full).abs().max() > 1e-2


def test_a_needle_is_found_by_a_sparse_prefill() -> None:
    """A key that fits one of the last queries, 1,900 tokens back: 32 keys and 102 distances of 2,000 are enough."""
    (q, k, v), = sequences = random_sequences((2000,))
    k[:, :, 6::8], v[93] = 0.0, 50.0
    q[-1], q[-1, :, 6], k[93, :, 6] = 0.0, 16.0, 16.0
    backend = module.backend("dual_chunk:test", 256, 192, Sparse(512, 64, (32, 102)))
    (found,) = served(backend, sequences, ((2000,),))
    assert (found[-1] > 45).all()
    less = module.backend("dual_chunk:test", 256, 192, Sparse(512, 64, (30, 100)))  # the first and the nearest only
    assert (served(less, sequences, ((2000,),))[0][-1].abs() < 5).all()


def test_sizes_of_a_checkpoint(tmp_path) -> None:
    """Its file, as a list of layers or by number."""
    heads = {str(h): ["vertical_and_slash", 40 + h, 200, 0.9] for h in range(4)}
    other = dataclasses.replace(SITE, num_heads=8)
    for name, layers in (("list", [heads]), ("by_number", {"0": heads})):
        file = tmp_path / name
        file.write_text(json.dumps(layers))
        backend = get_backend(f"dual_chunk:64:16:32:8:{file}")
        assert "longer than 32 tokens" in backend.approximate
        cache = PagedKVCache.for_sites([SITE], num_pages=5, page_size=4, device="cpu")
        assert backend.make_state([SITE], cache, None) is not None
        with pytest.raises(UnsupportedAttention, match="layer 0 has 8 query heads, the file has 4 heads: it is of another"):
            backend.make_state([other], PagedKVCache.for_sites([other], num_pages=5, page_size=4, device="cpu"), None)


@pytest.mark.parametrize("content, message", [
    ("[{", "Expecting"), ('{"config_groups": {}}', "invalid literal"), ('[{"0": ["block_sparse", 8, 8, 1]}]', "the pattern"),
    ('[{"1": ["vertical_and_slash", 8, 8, 1]}]', r"has heads \[1\]"), ('[{"0": ["vertical_and_slash", 8]}]', "not \\[pattern"),
    ('[{"0": ["vertical_and_slash", 0, 8, 1]}]', "0 keys and 8 distances")])
def test_wrong_files(tmp_path, content: str, message: str) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"is not a sparse_attention_config.json of vertical and slash lines: .*{message}"):
        get_backend(f"dual_chunk:64:16:32:8:{file}")


@pytest.mark.parametrize("rest, message", [
    (":32", "write dual_chunk"), (":32:8", "write dual_chunk"), (":32:8:40", "write dual_chunk"), (":32:0:40:100", "write"),
    (":32:8:0:100", "write dual_chunk"), (":32:8:40:100:5", "write dual_chunk"), (":x:8:40:100", "write dual_chunk"),
    (":32:8:/no/such.json", "there is no file /no/such.json")])
def test_wrong_sizes(rest: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_backend(f"dual_chunk:64:16{rest}")


def test_sizes_that_change_short_sequences_are_named() -> None:
    """Not as a bug of quire: the trial sequence of an engine's start is longer than CHUNK."""
    with pytest.raises(UnsupportedAttention, match="the attention backend scores no key at a distance of more than 4 tokens. "
                                                   "Give it larger sizes"):
        quire.Engine(small_llama(std=0.3), attention="dual_chunk:4:2", compiler="eager", num_pages=16, max_num_seqs=2,
                     max_model_len=64)

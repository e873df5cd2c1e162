"""Backend ``double_sparsity``: exact where it says so, the chosen keys elsewhere, and what refuses it."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from quire import UnsupportedAttention
from quire.attn_ops.backends import double_sparsity as module
from quire.attn_ops.backends.double_sparsity import (
    LayerLabels,
    Options,
    choose_eager,
    choose_triton,
    decode_eager,
    decode_triton,
    labels_of,
)
from quire.attn_ops.conformance.batches import Batch, Failure, check, lay_out, run
from quire.attn_ops.conformance.checks import DECODE, MIXED
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.registry import all_backends, backends, get_backend
from tests.attn_ops.cases import FEW, pass_kit
from tests.attn_ops.oracle import oracle_attention

CPU = torch.device("cpu")


def ranked(heads: int = 2, dim: int = 16, layers: int = 1) -> dict[int, list[list[int]]]:
    """Channels in another order for each head."""
    generator = torch.Generator().manual_seed(0)
    return {i: [torch.randperm(dim, generator=generator).tolist() for _ in range(heads)] for i in range(layers)}


def make(tokens: int, dense_below: int = 0, channels: int | None = None, decode=None, **options):
    """A backend with the first ``channels`` of ``ranked``; None: whole keys."""
    given = Options(tokens, dense_below, channels, None if channels is None else ranked(**options))
    return module.backend("double_sparsity:test", given, decode)


def batch(backend, lens=(40, 7, 100), **options) -> Batch:
    site = dataclasses.replace(SITE, **options)
    return lay_out(site, [1] * len(lens), lens, page_size=4, device="cpu", expect=True)


SITE = module.AttentionSite(layer=0, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.float32, scale=0.25)


@FEW
def test_with_room_for_all_keys_it_passes_the_kit(only: str) -> None:
    """A model whose sequences are shorter than TOKENS gets dense attention's numbers."""
    pass_kit(make(1 << 20), only)


@pytest.mark.slow
def test_the_kernels_pass_the_kit_with_room_for_all_keys() -> None:
    pass_kit(make(1 << 20, decode=decode_triton), "batch")


def expected(case: Batch, tokens: int, limit: int, channels: torch.Tensor) -> list[torch.Tensor]:
    """Attention over the keys that the labels choose, one loop a sequence and head."""
    out = []
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        heads = []
        for head in range(case.q.shape[1]):
            kv = head // (case.q.shape[1] // keys.shape[1])
            label = torch.stack([keys[:, kv, c] for c in channels[kv].tolist()], 1).double()
            query = torch.stack([case.q[row, head, c] for c in channels[kv].tolist()]).double()
            order = sorted(range(len(keys)), key=lambda i: -float(label[i] @ query))
            kept = sorted(order[:tokens]) if len(keys) > limit else range(len(keys))
            found = oracle_attention(case.q[row : row + 1, head : head + 1], keys[list(kept), kv][:, None],
                                     values[list(kept), kv][:, None], scale=case.site.scale, softcap=case.site.softcap)
            heads.append(found[0, 0])
        out.append(torch.stack(heads))
    return out


@pytest.mark.parametrize("decode", [decode_eager, pytest.param(decode_triton, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens, dense_below, softcap", [(8, 0, None), (8, 50, 4.0)])
def test_attends_to_the_keys_that_labels_choose(decode, tokens: int, dense_below: int, softcap: float | None) -> None:
    backend = make(tokens, dense_below, 4, decode)
    case = batch(backend, softcap=softcap)
    out = run(backend, case)
    channels = torch.tensor([r[:4] for r in ranked()[0]])
    wanted = torch.stack(expected(case, tokens, max(tokens, dense_below), channels))
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)
    assert not torch.allclose(out.double(), case.expected, atol=1e-2), "nothing was left out"
    exact = [row for row, n in enumerate((40, 7, 100)) if n <= max(tokens, dense_below)]
    torch.testing.assert_close(out[exact].double(), case.expected[exact], atol=2e-5, rtol=0)


def sizes(seed: int) -> dict[str, int]:
    """Of a random decode: groups of 1 to 8 heads, tables wider than the longest sequence, a label of 1 to all channels."""
    choose = random.Random(seed)
    page_size, dim = choose.choice([1, 3, 4, 16]), choose.choice([8, 12, 16, 20])
    tokens = choose.randint(1, 40)
    return dict(page_size=page_size, dim=dim, dim_v=choose.choice([dim, 8, 24]), kv_heads=choose.randint(1, 3),
                group=choose.randint(1, 8), channels=choose.randint(1, dim), width=choose.randint(45, 150) // page_size + 1,
                tokens=tokens, dense_below=choose.choice([0, tokens - 1, tokens, tokens + choose.randint(1, 60)]))


#: A small one.
QUICK = {(15, torch.float16)}


@pytest.mark.parametrize(("seed", "dtype"), [
    pytest.param(seed, dtype, marks=[pytest.mark.slow] * ((seed, dtype) not in QUICK))
    for seed in range(4, 17) for dtype in (torch.float32, torch.float16)])
def test_kernels_are_their_definition(seed: int, dtype: torch.dtype) -> None:
    """Labels of small whole numbers: scores are exact, and many are equal."""
    n, generator = sizes(seed), torch.Generator().manual_seed(seed)
    limit, most = max(n["tokens"], n["dense_below"]), n["width"] * n["page_size"]
    lens = torch.tensor([0, 1, min(limit, most), min(limit + 1, most), most - 1, most], dtype=torch.int32)
    pages = 1 + n["width"] * len(lens)
    q = torch.randn(len(lens), n["kv_heads"] * n["group"], 2 * n["dim"], generator=generator)[..., : n["dim"]]
    q = q.mul(2).round().to(dtype)  # strided
    keys, values = (torch.randn(pages, n["kv_heads"], n["page_size"], d, generator=generator).to(dtype).transpose(1, 2)
                    for d in (n["dim"], n["dim_v"]))
    keys.mul_(2).round_()
    table = (1 + torch.randperm(pages - 1, generator=generator)).view(len(lens), -1).int()
    channels = torch.stack([torch.randperm(n["dim"], generator=generator)[: n["channels"]] for _ in range(n["kv_heads"])])
    layer = LayerLabels(labels_of(keys, channels), channels.int(), True)
    options = Options(n["tokens"], n["dense_below"], n["channels"])
    positions, keep = choose_eager(q, layer, table, lens, options)
    chosen = choose_triton(q, layer, table, lens, options)
    for row, length in enumerate(lens.tolist()):
        if length > limit:
            wanted = positions[row][keep[row]].view(q.shape[1], -1).sort().values
            assert torch.equal(chosen[row].sort().values.long(), wanted)
    case = (q, keys, values, layer, table, lens, options, 0.2, 3.0 if seed % 2 else None)
    found, definition = decode_triton(*case), decode_eager(*case)
    # Rounded to the dtype: the weights, of at most 1, and the output, of at most 5.
    torch.testing.assert_close(found, definition, atol=2e-5 if dtype == torch.float32 else 1e-2, rtol=0)
    assert not found[0].any(), "a padding token"


@pytest.mark.parametrize("tokens", [8, 200])
@pytest.mark.parametrize("decode", [decode_eager, decode_triton])
def test_a_broken_key_is_not_left_out(decode, tokens: int) -> None:
    """A key that is NaN is chosen before all others, and what sees it is NaN, also where a part of the keys is not."""
    backend = make(tokens, channels=4, decode=decode)
    case = lay_out(SITE, [1, 1], [150, 150], page_size=4, device="cpu", expect=False)
    case.cache.k[0][case.metadata.block_table_tensor[0, 5], 2, 1] = float("nan")
    out = run(backend, case)
    assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all() and out[1].isfinite().all()


def test_labels_are_stored_by_the_kernel_as_by_its_definition() -> None:
    keys = torch.randn(5, 2, 4, 12, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    channels = torch.tensor([[3, 0, 7, 11, 5], [1, 2, 3, 4, 0]])
    labels = torch.zeros(5, 4, 2, 5)
    slots = torch.tensor([7, -1, 16, 4, -1])
    LayerLabels(labels, channels.int(), True).store_triton(keys, slots)
    wanted = torch.zeros_like(labels).view(20, 2, 5)
    wanted[[7, 16, 4]] = labels_of(keys, channels).reshape(20, 2, 5)[[7, 16, 4]]
    assert torch.equal(labels.view(20, 2, 5), wanted)


def test_copies_of_a_cache_get_labels_without_a_word_from_the_host(monkeypatch) -> None:
    """In a CUDA graph nothing is copied to the GPU: the channels are there since the state was made."""
    for backend in (make(4, channels=4), make(4)):
        cache = PagedKVCache.for_sites([SITE], num_pages=4, page_size=4, device="cpu")
        state = backend.make_state([SITE], cache, None)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", None)
            copy = state.of(torch.randn_like(cache.k[0]))
        assert copy.channels is state.of(cache.k[0]).channels


def test_a_needle_is_found() -> None:
    """One key among 4,096 that fits the query: eight tokens of 4,096 are enough, with a quarter of the channels."""
    backend = make(8, channels=4)
    case = lay_out(SITE, [1], [4096], page_size=16, device="cpu", expect=False)
    page, offset = case.metadata.block_table_tensor[0, 1234 // 16], 1234 % 16
    for head in range(2):
        case.cache.k[0][page, offset, head] = 8 * case.q[0, 2 * head]
    case.cache.v[0][page, offset] = 50.0
    out = run(backend, case)
    assert (out[0, [0, 2]] > 45).all()


def test_labels_follow_the_keys() -> None:
    """Prefill, then decode through one state: labels of both, of new pages, and of copied ones."""
    backend = make(4, channels=4)
    sites, cache = [SITE], PagedKVCache.for_sites([SITE], num_pages=12, page_size=4, device="cpu")
    state = backend.make_state(sites, cache, None)
    layer = state.of(cache.k[0])
    generator = torch.Generator().manual_seed(1)
    cache.k[0].normal_(generator=generator)
    layer.store(cache.k[0], torch.arange(4, 20))
    assert torch.equal(layer.labels[1:5], labels_of(cache.k[0], layer.channels)[1:5])
    assert not layer.labels[5:].any()
    cache.copy_pages(torch.tensor([2]), torch.tensor([7]))
    assert torch.equal(layer.labels[7], labels_of(cache.k[0], layer.channels)[7])
    again = backend.make_state(sites, cache, None)  # of a cache that holds keys
    assert torch.equal(again.of(cache.k[0]).labels, labels_of(cache.k[0], layer.channels))


def test_the_kit_compares_what_is_kept_with_what_is_declared() -> None:
    backend = make(1 << 20, channels=4)
    check(backend, batch(backend))
    for page_bytes in (None, lambda site, page_size: 1):
        liar = dataclasses.replace(backend, page_bytes=page_bytes)
        with pytest.raises(Failure, match="bytes beside the cache and declares"):
            check(liar, batch(liar))


def test_prefills_are_exact() -> None:
    backend = make(1, channels=4)
    rows = [r for r in MIXED if r[0]]
    case = lay_out(SITE, [n for n, _ in rows], [t for _, t in rows], page_size=4, device="cpu")
    torch.testing.assert_close(run(backend, case).double(), case.expected, atol=2e-5, rtol=0)
    decode = lay_out(SITE, [n for n, _ in DECODE], [t for _, t in DECODE], page_size=4, device="cpu")
    assert not torch.allclose(run(backend, decode).double(), decode.expected, atol=1e-2)


def test_it_is_never_chosen_and_says_what_it_is(tmp_path) -> None:
    file = tmp_path / "channels.json"
    file.write_text(json.dumps({"channels": ranked()}))
    backend = get_backend(f"double_sparsity:64:128:8:{file}")
    assert backend.priority is None and "64 keys of sequences longer than 128" in backend.approximate
    assert "double_sparsity" not in all_backends() and "quire calibrate" in str(backends("cpu"))
    with pytest.raises(UnsupportedAttention, match="every step must run whole through double_sparsity:8:8:all"):
        get_backend("hybrid:torch_native+double_sparsity:8:8:all")
    with pytest.raises(UnsupportedAttention, match="every step must run whole through double_sparsity:8:8:all"):
        get_backend("two_batch:double_sparsity:8:8:all")
    with pytest.raises(UnsupportedAttention, match="does not return the log-sum-exp"):
        get_backend("cascade:double_sparsity:8:8:all")


@pytest.mark.parametrize("name, message", [
    ("double_sparsity", "write double_sparsity:TOKENS"), ("double_sparsity:0:4:all", "write double"),
    ("double_sparsity:4:4:8", "write double"), ("double_sparsity:4:4:8:/no/such.json", "quire calibrate --out /no/such.json"),
    (f"double_sparsity:4:4:8:{__file__}", "is not a file of `quire calibrate`")])
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_backend(name)


def test_a_file_of_another_model_is_refused() -> None:
    backend = make(8, channels=4, heads=4)
    with pytest.raises(UnsupportedAttention, match="made from another model"):
        run(backend, batch(backend))
    with pytest.raises(UnsupportedAttention, match="17 channels of keys that have 16"):
        run(make(8, channels=17), batch(backend))
    with pytest.raises(UnsupportedAttention, match="no windows"):
        run(make(8, channels=4), batch(backend, window=5))

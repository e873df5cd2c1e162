"""Every architecture of ``configs.py``: compared with transformers, or refused for the right reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from quire import CommonAttentionMetadata, UnsupportedAttention, step
from quire.attn_ops.attention import Latent
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops import experts
from quire.attn_ops.ops.experts import expert_linear, expert_swiglu
from quire.attn_ops.ops.rope import rope_kv_write
from quire.attn_ops.registry import get_backend
from quire.graph_runner.packing_check import check_packing
from quire.passes.backend import quire_backend
from quire.passes.capture.hf_experts import experts_of
from quire.passes.capture.paged_model import PagedModel, find_sites
from quire.passes.compile.regions import compile_by_regions
from quire.passes.fusions.base import FusedWeights, Fusion
from quire.passes.fusions.expert_gate import fuse_expert_gate
from quire.passes.fusions.last_tokens import last_tokens
from quire.passes.fusions.rope import fuse_rope
from quire.passes.fx import copy_graph, value
from quire.passes.options import QuireOptions
from quire.passes.rewrite.lower import lower
from quire.passes.verify.row_wise import PRODUCTS
from tests.zoo.configs import REFUSED, SERVED, Served, build, has_config
from tests.zoo.harness import TOLERANCE, Batch, error, reference, serve

#: Those that the rope fusion leaves alone. No rotation (Flint: not in these layers), or one that it says why it leaves.
UNROTATED = {"gpt2", "gpt2_per_layer_scale", "gpt_bigcode", "opt", "biogpt", "bert_decoder", "flint",
             "deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "axk1", "youtu", "mistral4", "longcat_flash",
             "kimi_k25", "ministral3", "jetmoe", "gptj", "gpt_neo", "codegen", "gpt_neox_japanese", "bart_decoder",
             "marian_decoder", "roformer_decoder"}
#: Some whose last layer is all row-wise behind its attention, and some with parts that are: products on B rows, head included.
LAST_ROWS = {"llama": 5, "gpt2": 4, "gemma2": 5, "phi": 4, "opt": 4, "falcon": 4, "gemma4": 7, "mixtral": 1, "deepseek_v3": 4}
TRITON = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4")
QUICK_TRITON = ("deepseek_v3",)
#: Of ``EXPERTS``, those that run in Triton's interpreter too.
INTERPRETED_EXPERTS = ("gpt_oss", "qwen3_moe", "deepseek_v3")
#: Those that are not slow: one of each op.
QUICK_EXPERTS = ("gpt_oss", "qwen3_moe")
#: Those whose experts go by transformers' interface, which is switched over on a GPU (``passes/capture/hf_experts.py``).
EXPERTS = (*INTERPRETED_EXPERTS, "granitemoe_swa", "mimo_v2_flash", "qwen2_moe", "mixtral", "phimoe", "granitemoe",
           "granitemoeshared", "olmoe", "flex_olmo", "minimax_m2", "glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe",
           "exaone_moe", "cohere2_moe", "afmoe", "mellum", "solar_open", "hy_v3", "laguna", "deepseek_v2", "glm4_moe_lite",
           "kolibri1", "minimax_m3", "aria_text", "axk1", "mistral4", "kimi_k25")
#: Served by ``torch.compile`` from a prompt of one token too, which is a trace of its own.
SHORT_BY_HAND = ("llama", "gpt2", "mistral", "falcon", "opt", "mixtral", "gemma2", "gpt_oss", "llama4", "deepseek_v3")
#: Refused by ``torch.compile``: Dynamo cuts the forward where it reads the experts' counts, or which are in use.
CUT = ("jetmoe", "longcat_flash")
#: Scores with scale 1.0, four times as large as usual here: so is what their rounding does to the logits.
SHARP = ("granitemoe", "granitemoeshared")


@pytest.fixture(scope="module", autouse=True)
def dynamo_for_many_models() -> Iterator[None]:
    """Fake tensors are cached as users have them (``tests/conftest.py``). transformers' models share their outermost wrapper,
    which Dynamo traces eight times at most, and then never again; the whole zoo is in this process."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True, recompile_limit=1000, accumulated_recompile_limit=1000):
        yield


@dataclass
class Specimen:
    """One architecture, traced once for all its tests."""

    name: str
    entry: Served
    paged: PagedModel
    batch: Batch


def specimen(name: str) -> Iterator[Specimen]:
    entry = SERVED[name]
    if not has_config(entry.config):
        pytest.skip(f"the installed transformers has no {entry.config}")
    batch = reference(build(entry, attention="eager"))
    paged = PagedModel(build(entry), QuireOptions(compiler="eager"))
    yield Specimen(name, entry, paged, batch)
    paged.close()


@pytest.fixture(scope="module", params=[pytest.param(n, marks=[pytest.mark.slow] * e.slow) for n, e in SERVED.items()])
def zoo(request: pytest.FixtureRequest) -> Iterator[Specimen]:
    yield from specimen(request.param)


@pytest.fixture(scope="module")
def own_experts(request: pytest.FixtureRequest) -> Iterator[Specimen]:
    """With the experts by quire's op, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.passes.capture.hf_experts.wanted", lambda model: True)
        yield from specimen(request.param)


def at_work(zoo: Specimen) -> Any:
    """What serves the model on pages of 16 tokens; put another ``run`` in its place to serve that."""
    serve(zoo.paged, zoo.batch, page_size=16, attention="torch_native")  # compiles, if this is the first test
    (found,) = (p for key, p in zoo.paged.graph.compilations.items() if key[:2] == ("torch_native", 16) and "NHD" in key)
    return found


def check_trial(paged: PagedModel) -> None:
    """The engine's trial batch finds nothing wrong."""
    check_packing(paged, paged.sites, get_backend("torch_native"), page_size=4, kv_dtype=None, layout="NHD",
                  device=torch.device("cpu"), vocab_size=64, max_model_len=64)


def test_sites(zoo: Specimen) -> None:
    """Each feature that the config asks for reaches an attention site, by the route expected. Every layer of an MLA model is on
    the latent cache, and no layer of another model."""
    text = zoo.entry.options.get("text_config", zoo.entry.options)
    rank = text.get("kv_lora_rank")
    latents = {None} if rank is None else {Latent(rank, text["qk_rope_head_dim"])}
    assert {s.latent for s in zoo.paged.sites} == latents
    assert {s.route for s in zoo.paged.sites} == {zoo.entry.route}
    for field, wanted in zoo.entry.features.items():
        assert wanted in [getattr(s, field) for s in zoo.paged.sites], f"no site has {field}={wanted}"
    assert bool(experts_of(zoo.paged.model)) == (zoo.name in EXPERTS)


@pytest.mark.parametrize("page_size, layout, pad", [(1, "NHD", (0, 0)), (4, "NHD", (3, 2)), (16, "HND", (0, 0))])
def test_logits(zoo: Specimen, page_size: int, layout: str, pad: tuple[int, int]) -> None:
    """Ragged steps that mix chunked prefill and decode give the logits of each sequence alone."""
    assert 0.3 < zoo.batch.scale < 100, "logits must be of order 1 to 10 for a relative tolerance to mean something"
    got = serve(zoo.paged, zoo.batch, page_size=page_size, layout=layout, attention="torch_native", pad=pad)
    assert error(got, zoo.batch) <= TOLERANCE


def test_mutations_are_seen(zoo: Specimen) -> None:
    """The test above has teeth: attention, and each of its features, moves the logits by over 100 tolerances."""
    defaults = {"window": None, "softcap": None, "chunk": None, "sinks": None}
    defaults["scale"] = zoo.paged.sites[0].head_dim ** -0.5
    if zoo.entry.features.get("scale") == defaults["scale"]:
        defaults["scale"] *= 2  # of two layers, the first one has the default
    mutations = {"only the query's own key": {"window": 1}}
    mutations |= {f"no {f}": {f: defaults[f]} for f in zoo.entry.features if f in defaults}
    latent = zoo.paged.sites[0].latent is not None
    mutations |= {"twice the scale": {"scale": 2 * zoo.paged.sites[0].scale}} if latent else {}
    for name, mutation in mutations.items():  # MLA on the latent cache has a scale, and no other such options
        dense = name != "twice the scale"
        got = serve(zoo.paged, zoo.batch, page_size=8, attention="torch_native", mutation=mutation, dense=dense)
        assert error(got, zoo.batch) > 1e-3, f"{name}: not seen"
    assert error(serve(zoo.paged, zoo.batch, page_size=8, attention="torch_native", dense=True), zoo.batch) <= TOLERANCE


def test_cut_into_pieces(zoo: Specimen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut behind every attention op (``passes/compile/regions.py``), the graph computes the same to the last bit."""
    paged = at_work(zoo)
    whole = serve(zoo.paged, zoo.batch, page_size=16, attention="torch_native")
    inputs: list[int] = []

    def op_by_op(gm: fx.GraphModule, fakes: list[Any]) -> Any:
        inputs.append(len(fakes))
        return gm.forward

    monkeypatch.setattr(paged, "run", paged.run._replace(call=compile_by_regions(paged.lowered, op_by_op, always=True)))
    pieces = serve(zoo.paged, zoo.batch, page_size=16, attention="torch_native")
    assert 3 <= len(inputs) <= len(zoo.paged.sites) + 1
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_rope_fusion(zoo: Specimen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pass finds the rotation (passes/fusions/rope.py), the logits stay; where it does not, nothing changes."""
    paged = at_work(zoo)
    lowered = lower(copy_graph(zoo.paged.graph.raised), paged.lowered.target)
    matches = fuse_rope(Fusion(lowered.gm, backend=lowered.target.backend))
    lowered.gm.graph.lint()
    lowered.gm.recompile()
    assert matches == sum(n.target is rope_kv_write for n in lowered.gm.graph.nodes) <= len(zoo.paged.sites)
    assert (matches == 0) == (zoo.name in UNROTATED)
    monkeypatch.setattr(paged, "run", paged.run._replace(call=lowered.gm.forward))
    got = serve(zoo.paged, zoo.batch, page_size=16, attention="torch_native", pad=(3, 2))
    assert error(got, zoo.batch) <= TOLERANCE


def test_last_tokens(zoo: Specimen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are taken above the final norm at least (passes/fusions/last_tokens.py); the logits of the selected rows stay."""
    paged, graph = at_work(zoo), zoo.paged.graph
    gm = copy_graph(graph.raised)
    assert last_tokens(Fusion(gm, graph.inputs, FusedWeights())) == 1
    (index,) = (n for n in gm.graph.nodes if n.op == "placeholder" and "logits_indices" in n.name)
    rows = str(value(index).shape[0])
    products = [n for n in gm.graph.nodes if n in PRODUCTS and rows in map(str, value(n).shape)]
    assert len(products) == LAST_ROWS.get(zoo.name, len(products)) >= 1
    monkeypatch.setattr(paged, "run", paged.run._replace(call=lower(gm, paged.lowered.target).gm.forward))
    got = serve(zoo.paged, zoo.batch, page_size=16, attention="torch_native", pad=(3, 2), backwards=True)
    assert error(got, zoo.batch) <= TOLERANCE


def test_packing_check(zoo: Specimen) -> None:
    check_trial(zoo.paged)


@pytest.mark.slow  # tests/graph_runner/test_packing_check.py has small models of bfloat16
@pytest.mark.parametrize(("name", "dtype"), [
    ("gpt2", torch.float16),
    *((n, torch.bfloat16) for n in ("llama", "gpt_oss", "falcon", "gemma3n", "deepseek_v3", "qwen3_moe"))])
def test_packing_check_of_halves(name: str, dtype: torch.dtype) -> None:
    """Models of half precision are served: their trial in float32 finds nothing wrong either."""
    paged = PagedModel(build(SERVED[name]).to(dtype), QuireOptions(compiler="eager"))
    check_trial(paged)
    paged.close()


@pytest.mark.slow  # the quick ones: tests/passes/test_step.py, and tests/passes/capture/test_retrace.py for eager attention
def test_greedy_by_hand(zoo: Specimen) -> None:
    """``torch.compile`` and ``quire.step``: a prompt, then one token at a time. The backend sees F.sdpa and its mask, or
    transformers' eager attention (gemma2, gpt_oss) and numbers of tokens (llama4), and then traces the step by the attention
    interface."""
    if zoo.name in CUT:
        pytest.skip("torch.compile cuts its graph: test_pieces_are_refused_by_hand")
    for prompt in (5, 1) if zoo.name in SHORT_BY_HAND else (5,):
        model, plain = build(zoo.entry), build(zoo.entry, attention="eager")
        ids = torch.randint(3, 64, (1, prompt), generator=torch.Generator().manual_seed(0))
        want, row = ids, ids
        cache = PagedKVCache.for_sites(zoo.paged.sites, num_pages=9, page_size=4, device="cpu")
        compiled = torch.compile(model, backend=quire_backend, options={"compiler": "eager"})
        for _ in range(4):
            length = want.shape[1]
            meta = CommonAttentionMetadata.build([row.shape[1]], [length], [[3, 1, 2, 5]], page_size=4)
            with torch.no_grad(), step(cache, meta):
                got = compiled(input_ids=row, position_ids=meta.positions[None], use_cache=False).logits[:, -1]
            with torch.no_grad():
                logits = plain(input_ids=want, use_cache=False).logits[:, -1]
            assert (got - logits).abs().max() <= TOLERANCE * (2 if zoo.name in SHARP else 1) * logits.abs().max()
            row = got.argmax(-1)[None]
            want = torch.cat([want, row], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT[:1])
def test_pieces_are_refused_by_hand(name: str) -> None:
    model, ids = build(SERVED[name]), torch.arange(5)[None]
    cache = PagedKVCache.for_sites(find_sites(model), num_pages=9, page_size=4, device="cpu")
    meta = CommonAttentionMetadata.build([5], [5], [[3, 1]], page_size=4)
    compiled = torch.compile(model, backend=quire_backend, options={"compiler": "eager"})
    with pytest.raises(Exception, match="torch.compile cuts its graph .*quire.Engine"), torch.no_grad(), step(cache, meta):
        compiled(input_ids=ids, position_ids=meta.positions[None], use_cache=False)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK_TRITON)) for n in TRITON])
def test_triton_interpreted(name: str) -> None:
    why = get_backend("triton").available(torch.device("cpu"))
    if why:
        pytest.skip(why)
    for s in specimen(name):
        assert error(serve(s.paged, s.batch, page_size=4, attention="triton", pad=(3, 2)), s.batch) <= TOLERANCE


@pytest.mark.parametrize("own_experts", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK_EXPERTS)) for n in EXPERTS],
                         indirect=True)
def test_experts(own_experts: Specimen) -> None:
    """By the op's definition."""
    paged, batch = own_experts.paged, own_experts.batch
    ops = [2 if n.target == expert_swiglu else n.target == expert_linear for n in paged.graph.gm.graph.nodes]
    assert sum(ops) == 2 * len(experts_of(paged.model))
    for page_size, pad in ((4, (3, 2)), (16, (0, 0))):
        assert error(serve(paged, batch, page_size=page_size, attention="torch_native", pad=pad), batch) <= TOLERANCE
    check_trial(paged)


@pytest.mark.parametrize("most_pairs", [pytest.param(experts.MAX_PAIRS, id="few pairs"),
                                        pytest.param(0, id="many pairs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("own_experts", [
    pytest.param(n, marks=[pytest.mark.slow] * (n != "qwen3_moe")) for n in INTERPRETED_EXPERTS], indirect=True)
def test_experts_interpreted(own_experts: Specimen, most_pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its kernels, in the place of the definition."""
    if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines that have Triton and no GPU")
    monkeypatch.setattr(experts, "MAX_PAIRS", most_pairs)
    called: set[str] = set()
    with torch.library._scoped_library("quire", "IMPL") as library:
        for name, kernel in (("expert_linear", experts.expert_linear_cuda), ("expert_swiglu", experts.expert_swiglu_cuda)):
            library.impl(name, lambda *args, name=name, kernel=kernel: called.add(name) or kernel(*args), "CPU",
                         allow_override=True)
        got = serve(own_experts.paged, own_experts.batch, page_size=4, attention="torch_native", pad=(3, 2))
    assert called == {"expert_linear" if own_experts.name == "gpt_oss" else "expert_swiglu"}
    assert error(got, own_experts.batch) <= TOLERANCE


@pytest.mark.parametrize("own_experts", ["gpt_oss"], indirect=True)
def test_expert_gate_fusion(own_experts: Specimen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer's gate is found (passes/fusions/expert_gate.py), and the logits stay."""
    paged, graph = at_work(own_experts), own_experts.paged.graph
    gm = copy_graph(graph.raised)
    assert fuse_expert_gate(Fusion(gm, graph.inputs)) == len(experts_of(own_experts.paged.model)) > 0
    gm.graph.lint()
    assert not any(n.target == expert_linear for n in gm.graph.nodes)
    monkeypatch.setattr(paged, "run", paged.run._replace(call=lower(gm, paged.lowered.target).gm.forward))
    got = serve(own_experts.paged, own_experts.batch, page_size=16, attention="torch_native", pad=(3, 2))
    assert error(got, own_experts.batch) <= TOLERANCE


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * e.slow) for n, e in REFUSED.items()])
def test_refused(name: str) -> None:
    entry = REFUSED[name]
    if not has_config(entry.config):
        pytest.skip(f"the installed transformers has no {entry.config}")
    model = build(entry)
    with pytest.raises(UnsupportedAttention, match=entry.match):
        PagedModel(model, QuireOptions(compiler="eager", page_size=4)).close()

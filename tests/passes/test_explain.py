"""``quire.explain`` and the attention-site snapshots: what they print of models that can be served and that cannot."""

from __future__ import annotations

import functools
import re
import textwrap
from dataclasses import replace

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from torch import nn

import quire
from quire.passes.explain import Explanation, attention_sites
from tests.passes.models import tiny
from tests.tiny import snapshot, unchanged

pytestmark = pytest.mark.usefixtures("traces_kept")

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=32, max_position_embeddings=64)


def build(config) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama():
    return build(transformers.LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def gemma2():
    """A window on every other layer, softcap, and a scale of its own."""
    return build(transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=9, query_pre_attn_scalar=64,
                                           attn_logit_softcapping=5.0))


@pytest.fixture(scope="module")
def mamba2():
    return build(transformers.Mamba2Config(**SIZES, num_heads=8, head_dim=8, state_size=8, n_groups=1))


def test_explain_served(llama) -> None:
    with unchanged(llama):
        found = quire.explain(llama)
    assert isinstance(found, Explanation) and found.supported and found.error is None
    assert found.selection.backend.name == "torch_native" and [s.layer for s in found.sites] == [0, 1]
    assert_expected_inline(str(found), """\
LlamaForCausalLM: 2 attention sites
layer  module                    route      needs               scale     lowered to
0-1    model.layers.*.self_attn  interface  GQA 4:2x8, float32  0.353553  torch_native_paged_attention
attention backend: torch_native""")
    assert repr(found) == str(found)
    assert_expected_inline(found.text(every=True), """\
LlamaForCausalLM: 2 attention sites
layer  module                    route      needs               scale     lowered to
0      model.layers.0.self_attn  interface  GQA 4:2x8, float32  0.353553  torch_native_paged_attention
1      model.layers.1.self_attn  interface  GQA 4:2x8, float32  0.353553  torch_native_paged_attention
attention backend: torch_native""")


def test_explain_equal_sites_that_do_not_follow_each_other(llama) -> None:
    found = quire.explain(llama)
    site = found.sites[0]

    def rows(windows: list[int | None]) -> list[str]:
        sites = [replace(site, layer=i, name=f"model.layers.{i}.self_attn", window=w) for i, w in enumerate(windows)]
        changed = replace(found, sites=sites, selection=replace(found.selection, sites=tuple(sites)))
        return [line.split("model.")[0].strip() for line in str(changed).splitlines()[2:-1]]

    assert rows([None] * 48) == ["0-47"]
    assert rows([8, None] * 4) == ["0-6 by 2", "1-7 by 2"]
    assert rows([8, 8, None, 8, 8, None, 8]) == ["0-1, 3-4, 6", "2, 5"]


def test_explain_a_module_of_ones_own() -> None:
    with torch.no_grad():
        assert_expected_inline(str(quire.explain(tiny(4, 1))), """\
Tiny: 2 attention sites
layer  module    route   needs               scale  lowered to
0-1    layers.*  raised  MQA 4:1x4, float32  0.5    torch_native_paged_attention
attention backend: torch_native""")


def test_explain_refused(mamba2) -> None:
    with unchanged(mamba2):
        found = quire.explain(mamba2)
    assert not found.supported and found.selection is None and found.sites == []
    assert_expected_inline("\n".join(textwrap.wrap(str(found), 100)), """\
Mamba2ForCausalLM: 0 attention sites refused: mamba2 has layers of type ['linear_attention']: they
keep state that is not keys and values (SSM, convolution, linear attention), which a packed batch
would leak between sequences. quire serves ['chunked_attention', 'full_attention',
'sliding_attention'].""")
    with pytest.raises(quire.UnsupportedAttention, match="keep state that is not keys and values"):
        quire.assert_attention_sites(mamba2, "layer")


def test_explain_no_backend_fits(gemma2) -> None:
    """The sites are shown, and for each backend why not."""
    found = quire.explain(gemma2, attention="flashinfer", page_size=16)
    assert not found.supported and len(found.sites) == 2
    text = str(found)
    assert "refused: attention='flashinfer' cannot serve this model on cpu with page_size=16" in text
    assert re.search(r"flashinfer: .*\nCan serve it here: .*torch_native", text)
    assert text.splitlines()[2].split()[-1] == "refused"


def test_explain_a_model_in_training_mode(llama) -> None:
    llama.train()
    try:
        before = snapshot(llama)
        assert quire.explain(llama).supported
        assert snapshot(llama)["training"] == before["training"]
    finally:
        llama.eval()


def test_assert_attention_sites(llama, gemma2, monkeypatch) -> None:
    monkeypatch.setattr("quire.passes.explain.attention_sites", functools.cache(attention_sites))  # which traces the model
    table = attention_sites(llama)
    quire.assert_attention_sites(llama, table)
    indented = "\n\n" + "".join(f"        {line}\n" for line in table.splitlines()) + "\n  "
    quire.assert_attention_sites(llama, indented)
    with unchanged(llama), pytest.raises(AssertionError) as error:
        quire.assert_attention_sites(llama, indented.replace("0.353553", "0.125"))
    assert_expected_inline(str(error.value), """\
the attention sites of LlamaForCausalLM changed:
--- expected
+++ actual
@@ -1,3 +1,3 @@
 layer  module                    route      needs               scale
-0      model.layers.0.self_attn  interface  GQA 4:2x8, float32  0.125
-1      model.layers.1.self_attn  interface  GQA 4:2x8, float32  0.125
+0      model.layers.0.self_attn  interface  GQA 4:2x8, float32  0.353553
+1      model.layers.1.self_attn  interface  GQA 4:2x8, float32  0.353553

The table is now:
layer  module                    route      needs               scale
0      model.layers.0.self_attn  interface  GQA 4:2x8, float32  0.353553
1      model.layers.1.self_attn  interface  GQA 4:2x8, float32  0.353553""")
    with pytest.raises(AssertionError, match="the attention sites of Gemma2ForCausalLM changed"):
        quire.assert_attention_sites(gemma2, table)
    with pytest.raises(AssertionError, match=r"(?s)\+layer .*The table is now:\nlayer "):
        quire.assert_attention_sites(llama, "")

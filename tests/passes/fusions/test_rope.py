"""The rope fusion: what it makes of a layer, what it leaves alone, and that the numbers and the caches stay."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor.utils import run_and_get_code

from tests.passes.models import changes, listing
from tests.passes.rotary import Rotary, matches, runs, same

pytestmark = pytest.mark.usefixtures("tokens_unchecked")


def test_before_and_after() -> None:
    before, after = (listing(lowered.gm.graph) for lowered, _, _ in runs(Rotary(), "none", "rope"))
    assert_expected_inline(changes(before, after), """\
-to = to(cos, torch.float32)
-unsqueeze = unsqueeze(to, 1)
-to_1 = to(sin, torch.float32)
-unsqueeze_1 = unsqueeze(to_1, 1)
-mul_1 = mul(q_1, unsqueeze)
-getitem_17 = getitem(q_1, (Ellipsis, slice(4, None, None)))
-neg_1 = neg(getitem_17)
-getitem_22 = getitem(q_1, (Ellipsis, slice(None, 4, None)))
-cat = cat((neg_1, getitem_22), dim=-1)
-mul_2 = mul(cat, unsqueeze_1)
-q_2 = add(mul_1, mul_2)
-mul_3 = mul(k_1, unsqueeze)
-getitem_27 = getitem(k_1, (Ellipsis, slice(4, None, None)))
-neg_2 = neg(getitem_27)
-getitem_32 = getitem(k_1, (Ellipsis, slice(None, 4, None)))
-cat_1 = cat((neg_2, getitem_32), dim=-1)
-mul_4 = mul(cat_1, unsqueeze_1)
-k_2 = add(mul_3, mul_4)
-transpose = transpose(q_2, 1, 2)
-flatten = flatten(transpose, 0, 1)
-transpose_4 = transpose(k_2, 1, 2)
-flatten_1 = flatten(transpose_4, 0, 1)
-torch_native_paged_attention_default = torch_native_paged_attention.default(flatten, flatten_1, flatten_2,
+flatten_3 = flatten(cos, 0, 1)
+flatten_4 = flatten(sin, 0, 1)
+transpose_7 = transpose(q_1, 1, 2)
+transpose_8 = transpose(k_1, 1, 2)
+flatten_5 = flatten(transpose_7, 0, 1)
+flatten_6 = flatten(transpose_8, 0, 1)
+rope_kv_write_default = rope_kv_write.default(flatten_5, flatten_6, flatten_2, flatten_3, flatten_4, None,
+    None, 0.0, quire_k_cache_0, quire_v_cache_0, None, None, quire_slot_mapping)
+torch_native_paged_attention_default = torch_native_paged_attention.default(rope_kv_write_default, None, None,""")


def test_norms_go_along() -> None:
    """Both norms with one eps leave the graph; of two kinds, they stay, and only the rotation goes."""
    for eps, left in ((1e-6, 0), (1e-2, 2)):
        ((lowered, _, _),) = runs(Rotary(norms=(1e-6, eps)), "rope")
        assert listing(lowered.gm.graph).count(" = rsqrt(") == left
    # After the rotation, only what the op made is replaced: the keys that the model returns are still computed.
    model = Rotary(norms=(1e-6, 1e-6), norm_after=True, keys_too=True)
    assert matches(model) == 1
    same(model)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_does_not_copy_the_cache() -> None:
    """Two ops write the cache of a layer, one after the other, and both in place."""
    with torch._inductor.config.patch(force_disable_caches=True):
        ((_, out, keys),), code = run_and_get_code(runs, Rotary(), "rope", compiler="inductor")
    ((_, wanted, wanted_keys),) = runs(Rotary(), "none")
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(keys, wanted_keys, atol=1e-6, rtol=0)
    paged = next(c for c in code if "rope_kv_write" in c)
    assert len(re.findall(r"torch\.ops\.quire\.rope_kv_write\.default\(", paged)) == 1
    assert not re.findall(r"empty_strided\w*\(\(s\d+, 4, 2, 8\)", paged), "a buffer of the cache's shape: Inductor copies it"

"""The fusion for decode batches: what becomes one kernel, what must not, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F

from quire.attn_ops.ops.small_linear import small_linear
from quire.passes.fusions.projections import fuse_projections
from quire.passes.fusions.registry import has_small_passes
from quire.passes.fusions.small_linear import fuse_small_linear
from tests.passes.models import RMSNorm, after, listing


class Layer(nn.Module):
    """The two halves of a Llama layer, without the attention."""

    def __init__(self, act=F.silu, norm: nn.Module | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act = norm or RMSNorm(32), act
        self.gate, self.up = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down = nn.Linear(48, 32, bias=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


def test_a_layer_becomes_two_kernels() -> None:
    torch.manual_seed(1)
    x = torch.randn(1, 5, 32, dtype=torch.bfloat16)
    model = Layer()
    matches, gm, out = after(model, x, fuse_projections, fuse_small_linear)
    assert matches == [1, 2]
    assert_expected_inline(listing(gm.graph), """\
s0: size s0
l_x_: [1, s0, 32]
l_self_modules_norm_parameters_weight_: [32]
l_self_modules_gate_parameters_weight_: [48, 32]
l_self_modules_up_parameters_weight_: [48, 32]
l_self_modules_down_parameters_weight_: [32, 48]
quire_fused_0: [96, 32]
small_linear_default = small_linear.default(l_x_, quire_fused_0, None, l_self_modules_norm_parameters_weight_,
    1e-06, None, True)
small_linear_default_1 = small_linear.default(small_linear_default, l_self_modules_down_parameters_weight_,
    None, None, 0.0, l_x_, False)
return (small_linear_default_1,)""")
    with torch.no_grad():
        assert torch.equal(out, model(x))  # on a CPU the op runs its definition, in the order the model has it
    assert after(Layer(dtype=torch.float32), x.float(), fuse_projections, fuse_small_linear)[0][1] == 0


@pytest.mark.parametrize("gelu", [nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")], ids=["module", "function"])
def test_gates_with_gelu(gelu) -> None:
    """Gemma's: else a step has one more launch in each layer."""
    torch.manual_seed(1)
    x, model = torch.randn(1, 5, 32, dtype=torch.bfloat16), Layer(act=gelu)
    matches, gm, out = after(model, x, fuse_projections, fuse_small_linear)
    assert matches == [1, 2]
    both, down = gm.graph.find_nodes(op="call_function", target=small_linear)
    assert both.kwargs == {"gelu": True} and both.args[6] is True and not down.kwargs and down.args[6] is False
    assert "gelu(" not in listing(gm.graph)
    with torch.no_grad():
        assert torch.equal(out, model(x))


class Shared(Layer):
    """The norm's result, the product and the sum's other side have users of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.down(self.act(self.gate(y)) * self.up(y))
        return (x + z) * z.sigmoid() + y


def layer(forward, **options):
    """A Layer with another forward, in the graph of which nothing may be folded that would change the result."""
    return type(forward.__name__, (Layer,), {"forward": forward})(**options)


def input_changed_before_the_sum(self, x):
    x = x * 1.0
    y = self.square(x)
    x.mul_(0.5)
    return x + y


def input_changed_before_the_product(self, x):
    x = x * 1.0
    gate, up = torch.split(self.both(x), [48, 48], -1)
    x.mul_(3)
    return self.down(self.act(gate) * up) + x


def input_of_the_norm_changed(self, x):
    x = x * 1.0
    y = self.norm(x)
    x.add_(1.0)
    return x + self.up(y)[..., :32]


def scaled_sum(self, x):
    return torch.add(x, self.down(self.up(x)), alpha=0.25)


def sum_into_another(self, x):
    y = torch.empty_like(x)
    torch.add(x, self.down(self.up(x)), out=y)
    return y


def split_of_tokens(self, x):
    a, b = torch.split(self.both(x[0, :4]), [2, 2], 0)
    return self.act(a) * b


def in_halves(self, x):
    """As Phi-3 and GLM-4 have it: gate and up are one layer, cut by chunk, and the sum is behind a dropout that is off."""
    gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
    return x + F.dropout(self.down(up * self.act(gate)), 0.1, self.training)


def in_halves_of_a_size(self, x):
    gate, up = self.both(self.norm(x)).split(48, -1)
    return x + self.down(up * self.act(gate))


def in_uneven_parts(self, x):
    gate, up, _ = self.both(self.norm(x)).split(40, -1)
    return self.act(gate) * up


def in_thirds(self, x):
    gate, up, more = self.both(self.norm(x)).chunk(3, -1)
    return self.square(up * self.act(gate)) + more


def halves_of_tokens(self, x):
    gate, up = self.both(x[:, :4]).chunk(2, 1)
    return up * self.act(gate)


def gelu_by_erf(self, x):
    gate, up = self.both(x).chunk(2, -1)
    return self.down(up * F.gelu(gate))


def dropout_that_is_on(self, x):
    return x + F.dropout(self.down(self.up(x)), 0.0, True)


def weight_by_name(self, x):
    return x + self.down(self.act(F.linear(self.norm(x), weight=self.gate.weight)))


def bias_for_all(self, x):
    return F.linear(x, self.up.weight, self.down.weight[0, 0])


def bias_of_tokens(self, x):
    return F.linear(x[0], self.up.weight, self.up.weight[: x.shape[1], :1] + self.up(x[0]) * 0)


def autocast_inside(self, x):
    with torch.autocast("cpu", torch.float16):
        return self.up(x) * 1.0


def norm_of_one_weight(*size):
    norm = RMSNorm(32)
    norm.weight = nn.Parameter(torch.full(size, 0.7))
    return norm


# What changes an input before the last of an operation's parts: on the fused graph as it is, whose op reads its inputs there.
CHANGES = (input_changed_before_the_sum, input_changed_before_the_product, input_of_the_norm_changed, scaled_sum,
           sum_into_another, split_of_tokens)


@pytest.mark.parametrize("model, matches, left", [
    (Layer(act=F.gelu), 2, ["gelu"]),  # by erf
    (Layer(norm=RMSNorm(32, offset=1.0)), 2, ["rsqrt"]),  # Gemma's norm
    (Layer(norm=nn.LayerNorm(32)), 2, ["layer_norm"]),
    (Layer(norm=norm_of_one_weight()), 2, ["rsqrt"]), (Layer(norm=norm_of_one_weight(1)), 2, ["rsqrt"]),
    (layer(in_thirds), 2, ["chunk", "silu"]), (layer(in_uneven_parts), 1, ["split", "silu"]),
    (layer(halves_of_tokens), 1, ["chunk", "silu"]),
    (layer(gelu_by_erf), 2, ["chunk", "gelu"]), (layer(dropout_that_is_on), 2, ["dropout", "add"]),
    (Shared(), 2, ["rsqrt", "add"]), (layer(weight_by_name), 1, []), *((layer(change), None, []) for change in CHANGES),
], ids=["gelu", "gemma_norm", "layer_norm", "scalar_weight", "one_weight", "in_thirds", "in_uneven_parts", "halves_of_tokens",
        "gelu_by_erf", "dropout_that_is_on", "shared", "weight_by_name",
        *(change.__name__ for change in CHANGES)])
def test_what_stays(model, matches, left) -> None:
    model.both, model.square = nn.Linear(32, 96, bias=False).bfloat16(), nn.Linear(32, 32, bias=False).bfloat16()
    x = torch.randn(1, 5, 32, dtype=torch.bfloat16)
    (_, found), gm, out = after(model, x, fuse_projections, fuse_small_linear)
    assert found == matches if matches else found >= 1
    assert all(name in listing(gm.graph) for name in left)
    with torch.no_grad():
        torch.testing.assert_close(out, model(x), atol=0, rtol=0)


@pytest.mark.parametrize("forward", [in_halves, in_halves_of_a_size])
def test_gate_and_up_in_one_layer_and_dropouts_that_are_off(forward) -> None:
    """Else a step of Phi-3, Phi-4 or GLM-4 has up to three more launches in each layer."""
    torch.manual_seed(1)
    x, model = torch.randn(1, 5, 32, dtype=torch.bfloat16), layer(forward)
    model.both = nn.Linear(32, 96, bias=False).bfloat16()
    model.eval()
    (matches,), gm, out = after(model, x, fuse_small_linear)
    assert matches == 2
    assert [node.target for node in gm.graph.nodes if node.op.startswith("call")] == [small_linear] * 2
    with torch.no_grad():
        assert torch.equal(out, model(x))


@pytest.mark.parametrize("forward, matches", [(bias_for_all, 0), (bias_of_tokens, 1), (autocast_inside, 0)])
def test_biases_and_dtypes_that_kernels_do_not_take(forward, matches) -> None:
    """One bias for all outputs, or one for each token, is broadcast; and autocast casts in front of a layer."""
    model, x = layer(forward), torch.randn(1, 5, 32, dtype=torch.bfloat16)
    (found,), _, out = after(model, x, fuse_small_linear)
    assert found == matches
    with torch.no_grad():
        torch.testing.assert_close(out, model(x), atol=0, rtol=0)


def test_the_switch() -> None:
    assert has_small_passes("all") and has_small_passes(["small_linear"])
    assert not has_small_passes("none") and not has_small_passes(["projections"])

"""Rules of the row-wise proof for products, convolutions, norms and pooling."""

from __future__ import annotations

from typing import Any

from quire.passes.verify.row_rules import Call, no_lengths, rule, same
from quire.passes.verify.rows import CONST, Const, Group, Known, Mixed, Mixes, Rows

#: Over the last one, two or three dimensions.
_SPATIAL = {name: n for n in (1, 2, 3) for name in (
    f"avg_pool{n}d", f"max_pool{n}d_with_indices", f"_adaptive_avg_pool{n}d", f"adaptive_avg_pool{n}d",
    f"adaptive_max_pool{n}d", f"reflection_pad{n}d", f"replication_pad{n}d", f"max_pool{n}d")}


def _product(call: Call, left: str, right: str, batched: int = 0) -> Rows | None:
    """(batch, m, k) @ (batch, k, n); a vector has no m, or no n."""
    a, b, x, y = call.rows(left), call.rows(right), call[left], call[right]
    vector = y.dim() - batched == 1
    if (a is not None and a.dim == x.dim() - 1) or (b is not None and b.dim == batched):
        raise Mixes("it sums over the tokens")
    if a is not None and b is not None and not (a.dim < batched and b.dim == a.dim and a.same_rows(b)):
        raise Mixes("it multiplies each token with each other one")
    if b is not None and not vector and b.dim > batched:
        return b.at(x.dim() - 1)
    return a if a is not None else b


@rule("mm mv dot vdot bmm addmm baddbmm addmv _int_mm")
def _matrix_product(call: Call) -> Known:
    if call.name == "mm" and isinstance(group := call.of("self"), Group) and isinstance(call.of("mat2"), Const):
        return group
    left, right = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec"), "mv": ("self", "vec"),
                   "dot": ("self", "tensor"), "vdot": ("self", "other")}.get(call.name, ("self", "mat2"))
    product = _product(call, left, right, batched=call.name in ("bmm", "baddbmm"))
    rows = call.rows("self") if left != "self" else None
    if rows is not None:  # added to the product
        rows = rows.at(rows.dim + call.result.dim() - call["self"].dim())
    return same([product, rows]) or CONST


@rule("bitsandbytes::gemm_4bit bitsandbytes::gemv_4bit")
def _four_bit_product(call: Call) -> Known:
    """Rows ``A`` times a weight in 4 bits: its numbers, scales and tables, and the bias, are the same in every batch.
    ``quantized.check_rows`` tries out the kernels."""
    if any(not isinstance(call.of(name), Const) for name in call.given if name != "A"):
        raise Mixes("its weights are made of tokens")
    rows = call.rows("A")
    if rows is not None and rows.dim == call["A"].dim() - 1:
        raise Mixes("it sums over the tokens")
    return rows or CONST


@rule("cdist _cdist_forward _euclidean_dist")
def _distances(call: Call) -> Known:
    """Of each (..., row) of one operand to each of the other, as in a product with the other transposed."""
    found = []
    for name, place in (("x1", -2), ("x2", -1)):
        rows = call.rows(name)
        if rows is not None:
            dim = rows.dim - call[name].dim()
            if dim == -1:
                raise Mixes("it sums over the tokens")
            found.append(rows.at(call.result.dim() + (place if dim == -2 else dim)))
    return same(found) or CONST


@rule("_trilinear")
def _trilinear(call: Call) -> Known:
    """Products of three, each with dimensions of size 1 put in, summed over some: ``F.bilinear``."""
    found = []
    for name in ("1", "2", "3"):
        rows = call.rows(f"i{name}")
        for put_in in sorted(call[f"expand{name}"]):
            rows = rows.at(rows.dim + (put_in <= rows.dim)) if rows is not None else None
        found.append(rows)
    joined = same(found)
    if joined is None:
        return CONST
    if joined.dim in call["sumdim"]:
        raise Mixes("it sums over the tokens")
    return joined.at(joined.dim - sum(d < joined.dim for d in call["sumdim"]))


@rule("convolution _convolution")
def _convolution(call: Call) -> Known:
    rows, x = call.rows("input"), call["input"]
    if call.rows("weight") is not None or call.rows("bias") is not None:
        raise Mixes("its weights are made of tokens")
    if rows is None or rows.dim == 0:
        return rows or CONST
    at = rows.dim - 2

    def one(argument: str) -> Any:
        numbers = call[argument]
        return numbers[at if len(numbers) > 1 else 0]

    if at < 0 or call["weight"].shape[rows.dim] != 1 or one("stride") != 1 or one("padding") != 0 \
            or (call["transposed"] and one("output_padding") != 0):
        raise Mixes("it is a convolution over tokens: its state would leak between sequences")
    assert x.dim() == call["weight"].dim()
    return rows


@rule("native_layer_norm _fused_rms_norm")
def _layer_norm(call: Call) -> Known:
    rows, x = call.rows("input"), call["input"]
    if call.rows("weight") is not None or call.rows("bias") is not None:
        raise Mixes("its weights are made of tokens")
    if rows is not None and rows.dim >= x.dim() - len(call["normalized_shape"]):
        raise Mixes("it normalizes over the tokens")
    return rows or CONST


@rule("native_group_norm", lengths=True)
def _group_norm(call: Call) -> Known:
    no_lengths(call, but=("N", "C", "HxW"))
    rows = call.rows("input")
    if call.rows("weight") is not None or (rows is not None and rows.dim != 0):
        raise Mixes("it normalizes over the tokens")
    return rows or CONST


@rule("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_no_update "
      "_batch_norm_with_update", of="input")
def _batch_norm(call: Call, rows: Rows) -> Known | list[Known]:
    rows = rows.data
    training = call["training"] if "training" in call.given else "no_" not in call.name
    if training and rows.dim == 1 and all(call[n] is None for n in ("weight", "bias", "running_mean", "running_var")):
        own = rows.at(0)  # instance norm: each token is a channel, with statistics of its own
        return [rows, *[own] * (call.num_results - 1)]
    if training or rows.dim == 1:
        raise Mixes("it normalizes over the tokens, or one by one with numbers of their own (call model.eval())")
    return [rows, *[CONST] * (call.num_results - 1)]


@rule(*_SPATIAL)
def _spatial(call: Call) -> Known | list[Known]:
    first = call.first
    rows = call.rows(first)
    at = rows.dim - call.given[first].dim() + _SPATIAL[call.name] if rows is not None else -1

    def one(argument: str) -> Any:
        numbers = call["kernel_size"] if call[argument] == [] else call[argument]  # an empty stride is the kernel's size
        return numbers if isinstance(numbers, int) else numbers[at if len(numbers) > 1 else 0]

    if at >= 0 and (call["kernel_size"] is None or one("kernel_size") != 1 or one("stride") != 1 or one("padding") != 0):
        raise Mixes("it pools or pads over the tokens")
    if at >= 0 and rows is not None and call.num_results > 1:
        return [rows, Mixed("the indices of pooling count the tokens")]
    return rows or CONST

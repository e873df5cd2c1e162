"""The kit for ops that belong to no backend: ``merge_state(s)`` and attention over ragged sequences without a KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.conformance.batches import Failure, bits, compare_numbers, rounding, varlen_reference
from quire.attn_ops.conformance.checks import Skip
from quire.attn_ops.conformance.sweeps import SHAPES
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.cross import cross_attention
from quire.attn_ops.ops.merge_state import merge_state, merge_states
from quire.attn_ops.ops.varlen import IMPLEMENTATIONS, varlen_attention, varlen_attention_cuda
from quire.attn_ops.registry import all_backends

#: (lengths of queries, lengths of keys) of encoders, with empty and single-token sequences, and of cross attention.
ENCODERS = ([1, 0, 37, 64, 5], [1, 0, 37, 64, 5]), ([3, 1, 0, 40], [70, 1, 5, 9])


def op_checks(device: torch.device, dtype: torch.dtype | None = None) -> list[tuple[str, Callable[[], str | None]]]:
    """(name, function) of each check; dtype None: bfloat16 on a GPU, float32 on a CPU."""
    kit = OpKit(device, dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16))
    encoders = [name for name in SHAPES if "encoder" in name]
    return [
        ("merge of two states", kit.merge_two), ("merge of several states", kit.merge_many),
        ("merge of empty states", kit.merge_empty), ("merge past 2**31 elements", kit.merge_far),
        ("merge opcheck", kit.merge_opcheck),
        *((f"varlen {how}", lambda how=how: kit.varlen(how)) for how in (*IMPLEMENTATIONS[1:], *kit.providers())),
        *((f"varlen {name}", lambda name=name: kit.encoder(name)) for name in encoders),
        ("varlen padding", kit.varlen_padding), ("varlen lse merges", kit.varlen_merges),
        ("varlen opcheck", kit.varlen_opcheck),
        *((f"cross attention {b.name}", lambda b=b: kit.cross(b)) for b in all_backends().values()
          if b.plan is None and b.op is not None and device.type in b.capabilities.devices and b.verified),
    ]


class OpKit:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def randn(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def states(self, count: int, dim: int, tokens: int = 7, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (T, S, H, D) and lse (T, S, H), of which some are empty: -inf or +inf, with NaN as output."""
        out, lse = self.randn(tokens, count, heads, dim).to(self.dtype), 5 * self.randn(tokens, count, heads, seed=1)
        dice = self.randn(tokens, count, heads, seed=2)
        lse = lse.masked_fill(dice > 1, -math.inf).masked_fill(dice < -1.5, math.inf)
        lse[0], lse[1], lse[2] = -math.inf, math.inf, 1e4 + lse[2]
        return out.masked_fill(lse.isinf()[..., None], math.nan), lse

    def check_merged(self, found: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        empty = lse.isinf()
        wide = torch.where(empty, -math.inf, lse.double())
        total = torch.logsumexp(wide, 1)
        weights = torch.exp(wide - total.masked_fill(total.isinf(), 0.0)[:, None])[..., None]
        parts = out.double().masked_fill(empty[..., None], 0.0)
        expected, size = (weights * parts).sum(1), (weights * parts.abs()).sum(1)
        # An lse is known to half an eps of its size, which is a relative error of the weights.
        slack = torch.finfo(torch.float32).eps * (4 + wide.masked_fill(empty, 0.0).abs().amax(1))
        compare_numbers(found[0], expected, size * slack[..., None] + size * torch.finfo(self.dtype).eps + 1e-6)
        compare_numbers(found[1], total, slack + 1e-6, "lse")

    def merge_two(self) -> None:
        for dim in (64, 24, 128, 576):
            out, lse = self.states(2, dim)
            self.check_merged(merge_state(out[:, 0], lse[:, 0], out[:, 1], lse[:, 1]), out, lse)

    def merge_many(self) -> None:
        for count in (1, 3, 17):
            out, lse = self.states(count, 64)
            self.check_merged(merge_states(out, lse), out, lse)

    def merge_empty(self) -> None:
        for value in (-math.inf, math.inf):
            out, lse = self.randn(3, 2, 4, 8).to(self.dtype) * math.nan, torch.full((3, 2, 4), value, device=self.device)
            for merged, total in (merge_states(out, lse), merge_state(out[:, 0], lse[:, 0], out[:, 1], lse[:, 1])):
                if merged.count_nonzero() or not (total == -math.inf).all():
                    raise Failure("states without keys must merge to 0 with lse -inf")
        if [tuple(x.shape) for x in merge_states(out[:0], lse[:0])] != [(0, 4, 8), (0, 4)]:
            raise Failure("no tokens must give no tokens")

    def merge_far(self) -> None:
        """Strides that put the last state more than 2**31 elements away."""
        size = 2**31 + 2**20
        needed = 3 * size * self.dtype.itemsize
        if self.device.type == "cpu" or torch.cuda.mem_get_info(self.device)[0] < needed:
            raise Skip(f"needs a GPU with {needed / 2**30:.0f} GiB free")
        out = torch.empty(2, size, dtype=self.dtype, device=self.device)
        far = out.as_strided((4, 2, 4, 64), (256, out.stride(0), 64, 1))
        near, lse = self.states(2, 64, 4, 4)
        far.copy_(near)
        self.check_merged(merge_states(far, lse), near, lse)

    def merge_opcheck(self) -> None:
        out, lse = (x.nan_to_num(0.0, 0.0, 0.0) for x in self.states(2, 16))
        torch.library.opcheck(torch.ops.quire.merge_states.default, (out, lse))
        torch.library.opcheck(torch.ops.quire.merge_state.default, (out[:, 0], lse[:, 0], out[:, 1], lse[:, 1]))

    def inputs(self, queries: list[int], keys: list[int], heads: int = 4, kv_heads: int = 2, dims: tuple[int, int] = (32, 32),
               pad: int = 0) -> tuple[torch.Tensor, ...]:
        q, k = self.randn(sum(queries) + pad, heads, dims[0]), self.randn(sum(keys), kv_heads, dims[0], seed=1)
        v = self.randn(sum(keys), kv_heads, dims[1], seed=2)
        cu = [torch.tensor([0, *lens]).cumsum(0).int().to(self.device) for lens in (queries, keys)]
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), *cu

    def check_varlen(self, arguments: tuple[torch.Tensor, ...], implementation: str = "auto", lse: bool = True,
                     **options: Any) -> Any:
        options.setdefault("scale", arguments[0].shape[2] ** -0.5)
        before = [x.clone() for x in arguments]
        out, total = varlen_attention(*arguments, implementation=implementation, **options)
        if not all(torch.equal(bits(a), bits(b)) for a, b in zip(before, arguments, strict=True)):
            raise Failure("the op changed an input")
        expected, size, expected_lse = varlen_reference(*arguments, **options)
        compare_numbers(out, expected, rounding(size, expected, self.dtype, options.get("softcap")))
        if lse:
            compare_numbers(total, expected_lse, expected_lse.nan_to_num(0, 0, 0).abs() * 1e-4 + 1e-3, "lse")
        return out, total

    def providers(self) -> list[str]:
        """Backends with attention over ragged sequences that are usable here, besides that of the op itself."""
        return [n for n, b in all_backends().items() if b.varlen not in (None, varlen_attention_cuda)
                and self.dtype in b.capabilities.dtypes and self.device.type in b.capabilities.devices
                and b.available(self.device) is None]

    def varlen(self, implementation: str) -> str | None:
        if implementation == "kernel" and self.device.type == "cpu":
            raise Skip("on a CPU the op has no Triton kernel")
        lse = implementation != "sdpa"
        features: list[dict[str, Any]] = [{}, {"window": 1}, {"window": 7}, {"causal": True}, {"causal": True, "window": 7}]
        features += [{"softcap": 4.0}] if lse else []
        backend = all_backends().get(implementation)
        for lens in ENCODERS:
            for dims in ((32, 32), (24, 40), (128, 128)):
                if backend is not None and not backend.capabilities.head_dims(*dims):
                    continue
                for options in features:
                    self.check_varlen(self.inputs(*lens, dims=dims), implementation, lse, **options)
        for kv_heads in (1, 8):
            self.check_varlen(self.inputs(*ENCODERS[0], heads=8, kv_heads=kv_heads), implementation, lse)
        return None

    def encoder(self, name: str) -> None:
        lens, _ = SHAPES[name]
        self.check_varlen(self.inputs(lens, lens))

    def varlen_padding(self) -> None:
        for pad in (1, 70):
            arguments = self.inputs(*ENCODERS[0], pad=pad)
            out, _ = self.check_varlen(arguments)
            if out[-pad:].count_nonzero():
                raise Failure("outputs of padding tokens are not zero")

    def varlen_merges(self) -> None:
        """Attention over two halves of the keys, merged, is attention over all."""
        q, k, v, cu, _ = self.inputs([30, 9], [30, 9])
        lens, scale = [30, 9], q.shape[2] ** -0.5
        expected, size, _ = varlen_reference(q, k, v, cu, cu, scale=scale)
        parts: list[torch.Tensor] = []
        for half in (slice(0, 4), slice(4, None)):
            index = torch.cat([torch.arange(n)[half] + begin for n, begin in zip(lens, (0, 30), strict=True)]).to(q.device)
            ends = torch.tensor([0, *(len(range(n)[half]) for n in lens)]).cumsum(0).int().to(q.device)
            parts += varlen_attention(q, k[index], v[index], cu, ends, scale=scale)
        merged, _ = merge_state(*parts)
        compare_numbers(merged, expected, rounding(2 * size, expected, self.dtype))

    def varlen_opcheck(self) -> None:
        options: dict[str, Any] = {"scale": 0.2}
        for more in ({}, {"window": 3, "causal": True, "softcap": 2.0}):
            torch.library.opcheck(torch.ops.quire.varlen_attention.default, self.inputs(*ENCODERS[0]), {**options, **more})

    def cross(self, backend: AttentionBackend) -> None:
        """Keys written once, read in two steps, with requests without encoder tokens and padding."""
        if why := backend.available(self.device):
            raise Skip(why)
        dims = next(d for d in (64, 128, 8) if backend.capabilities.head_dims(d, d))
        lens, page = [40, 0, 17, 1], next(p for p in (16, 64, 128, 256) if backend.capabilities.page_sizes(p))
        scale = dims**-0.5
        site = AttentionSite(0, 4, 2, dims, dims, self.dtype, scale)
        if self.dtype not in backend.capabilities.dtypes:
            raise Skip(f"it has no {self.dtype}")
        cache = PagedKVCache.for_sites([site], num_pages=12, page_size=page, device=self.device)
        for held in (cache.k[0], cache.v[0]):
            held.fill_(math.nan)
        table = torch.tensor([[3, 7, 5], [0, 0, 0], [2, 4, 0], [9, 0, 0]], dtype=torch.int32, device=self.device)
        _, k, v, _, cu = self.inputs([1], lens, dims=(dims, dims))
        slots = torch.cat([table[r].long().repeat_interleave(page)[:n] * page + torch.arange(n, device=self.device) % page
                           for r, n in enumerate(lens)])
        for queries, pad in (([6, 2, 0, 3], 0), ([1, 1, 1, 1], 2)):
            q, _, _, starts, _ = self.inputs(queries, lens, dims=(dims, dims), pad=pad)
            new: dict[str, Any] = dict(k=k, v=v, slot_mapping=slots) if pad == 0 else {}
            out = cross_attention(backend, q, cache, 0, table, starts, cu.diff(), scale=scale, **new)
            expected, size, _ = varlen_reference(q, k, v, starts, cu, scale=scale)
            compare_numbers(out, expected, rounding(size, expected, self.dtype))

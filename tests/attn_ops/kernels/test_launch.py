"""Launches with tuples as arguments are recorded like their elements; constants of kernels agree with their definitions. And
the stream that graphs are recorded on."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from quire.attn_ops.kernels.host import CacheLayout, Caches, Strides, cache_layout, next_power_of_2
from quire.attn_ops.kernels.launch import Launch, TensorArgument, launch, recording, side_stream, synchronize
from quire.attn_ops.kv_quant import QMAX

triton = pytest.importorskip("triton")
tl = triton.language


def kernel(x, caches, strides, LAYOUT: tl.constexpr, PDL: tl.constexpr):
    raise AssertionError("launched")


class Kernel:
    fn = staticmethod(kernel)


def recorded(*args: Any, **options: Any) -> Launch:
    with recording() as found:
        launch(Kernel(), (3,), *args, **options)
    (one,) = found
    return one


def test_tuples_are_recorded_element_by_element() -> None:
    k = torch.zeros(2, 4, 2, 16, dtype=torch.float16)
    caches = Caches(k, k, None, None)
    layout = cache_layout(caches)
    one = recorded(k, caches, (64, 1), layout, pdl=False)
    described = TensorArgument(torch.float16, True)
    assert one.arguments == (described, Caches(described, described, None, None), (16, 1), layout)
    assert isinstance(one.arguments[1], Caches) and isinstance(one.arguments[3], CacheLayout)
    assert one.options == (("PDL", False),)
    assert pickle.loads(pickle.dumps(one)) == one == recorded(k, caches, (128, 1), layout, pdl=False)
    other = cache_layout(Caches(k[:, :2], k[:, :2], None, None))
    different = [recorded(k, caches, (64, 2), layout, pdl=False), recorded(k, caches, (64, 1), other, pdl=False),
                 recorded(k, Caches(k, k.view(-1)[1:], None, None), (64, 1), layout, pdl=False),
                 recorded(k, Caches(k, k, k.float(), k.float()), (64, 1), layout, pdl=False),
                 recorded(k, caches, (64, 1), layout, pdl=True)]
    assert len({one, *different}) == 6
    assert ("launch_pdl", True) in different[-1].options


def test_layout_of_slices() -> None:
    """Strides are the tensors' own: a cache may be a slice of a larger one."""
    k = torch.zeros(2, 4, 3, 40)[:, :, 1:, 8:]
    v = torch.zeros(2, 2, 4, 24).transpose(1, 2)
    layout = cache_layout(Caches(k, v, None, None))
    assert layout[:4] == (2, 32, 24, 4)
    assert layout.k == Strides(480, 120, 40) and layout.v == Strides(192, 24, 96)


def test_code_formats_are_those_of_the_definition() -> None:
    from quire.attn_ops.kernels.kv_quant import code_format

    names = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
    assert names.keys() == QMAX.keys()
    for dtype, kind in names.items():
        tiny, eps = (torch.finfo(dtype).tiny, torch.finfo(dtype).eps) if dtype.is_floating_point else (2.0**7, 2.0**-7)
        qmax, unit = QMAX[dtype], 2.0 ** (int(QMAX[dtype]).bit_length() - 1)
        assert code_format.fn(kind) == (qmax, tiny, 1.5 * 2.0**23 * eps, unit)


def test_next_power_of_2() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert [next_power_of_2(n, 16) for n in (1, 16, 17)] == [16, 16, 32]


def test_one_side_stream_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the device is named with its index or not, and whatever the current one was before."""
    monkeypatch.setattr("torch.cuda.Stream", lambda device: [device])
    monkeypatch.setattr("torch.cuda.current_device", lambda: current)
    monkeypatch.setattr("quire.attn_ops.kernels.launch._side_streams", {})
    for current in (0, 1):
        with side_stream(torch.device("cuda")) as found, side_stream(torch.device("cuda", current)) as named:
            assert found is named == [current]


@pytest.mark.parametrize("other", ["side_stream", "synchronize"])
def test_one_thread_at_a_time_records(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that start in two threads: the graph of one would hold the kernels of the other, or not be recorded."""
    log: list[str] = []
    monkeypatch.setattr("torch.cuda.Stream", lambda device: device)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: log.append("other"))
    monkeypatch.setattr("quire.attn_ops.kernels.launch._side_streams", {})
    started = threading.Event()

    def work() -> None:
        started.set()
        if other == "synchronize":
            synchronize(torch.device("cuda", 0))
            return
        with side_stream(torch.device("cuda", 1)):
            log.append("other")

    thread = threading.Thread(target=work)
    with side_stream(torch.device("cuda", 0)), side_stream(torch.device("cuda", 0)):
        thread.start()
        assert started.wait(10)
        thread.join(0.2)
        log.append("recorded")
    thread.join(10)
    assert log == ["recorded", "other"]

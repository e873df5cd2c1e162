"""EngineConfig: the one declaration of the engine's options, its checks, and where users see it."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import numpy as np
import pytest
import torch

import quire
from quire.graph_runner.config import EngineConfig, EngineOptions, check_options, kv_dtype, option_help, parse_option

NAMES = [option.name for option in dataclasses.fields(EngineConfig)]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("options", "message"), [
    (dict(num_pages=0), r"num_pages must be at least 2 \(page 0 is the null page\), got 0"),
    (dict(num_pages=1), "num_pages must be at least 2"),
    (dict(num_pages=10.5), "num_pages must be an integer or None, got 10.5"),
    (dict(page_size=1.5), "page_size must be an integer, got 1.5"), (dict(page_size=0), "page_size must be at least 1, got 0"),
    (dict(page_size=None), "page_size must be an integer, got None"),
    (dict(max_num_seqs="4"), "max_num_seqs must be an integer, got '4'"),
    (dict(max_num_seqs=True), "max_num_seqs must be an integer, got True"),
    (dict(max_num_seqs=0), "max_num_seqs must be at least 1, got 0"),
    (dict(max_num_batched_tokens=-1), "max_num_batched_tokens must be at least 1, got -1"),
    (dict(prefill_chunk_size=0), "prefill_chunk_size must be at least 1, got 0"),
    (dict(max_model_len=100.5), "max_model_len must be an integer or None, got 100.5"),
    (dict(max_model_len=1), r"max_model_len must be at least 2 \(a prompt token and a generated one\), got 1"),
    (dict(seed="x"), "seed must be an integer or None, got 'x'"),
    (dict(async_stepping=5), "async_stepping must be True or False or None, got 5"),
    (dict(gpu_memory_utilization="0.9"), "gpu_memory_utilization must be a number, got '0.9'"),
    (dict(gpu_memory_utilization=0), r"gpu_memory_utilization must be in \(0, 1\], got 0"),
    (dict(gpu_memory_utilization=float("nan")), r"gpu_memory_utilization must be in \(0, 1\], got nan"),
    (dict(kv_layout="DNH"), "kv_layout must be 'NHD' or 'HND' or None, got 'DNH'"),
    (dict(kv_cache_dtype="float7"), "kv_cache_dtype 'float7' is not 'auto', a torch dtype"),
    (dict(kv_cache_dtype=8), "kv_cache_dtype must be a string or a torch dtype, got 8"),
    (dict(kv_scales=0.1), "kv_scales=0.1 are the fixed scales of an fp8 KV cache: set kv_cache_dtype='fp8' or 'fp8_e5m2'"),
    (dict(kv_scales=0.1, kv_cache_dtype="int8"), "int8 has no NaN"),
    (dict(kv_scales="0.1"), "kv_scales must be a number or a dictionary of two numbers for each layer or None, got '0.1'"),
    (dict(kv_scales={0: 0.1}), "kv_scales must be a number or a dictionary of two numbers for each layer or None"),
    (dict(kv_scales={0: (0.1, -1.0)}, kv_cache_dtype="fp8"), "kv_scales must be numbers between .*; layer 0 has .0.1, -1.0."),
    (dict(cudagraph_capture_sizes=[1, "x"]), "cudagraph_capture_sizes must be a list of integers or 'sglang'"),
    (dict(compiler="gcc"), "compiler must be one of inductor, inductor-whole, eager; got 'gcc'"),
    (dict(fusions=["all_of_it"]), r"unknown fusions \['all_of_it'\]; there are \['quantized'"),
    (dict(fusions=5), "fusions must be a string or a list of strings, got 5"),
])
def test_bad_values(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_good_values() -> None:
    config = EngineConfig(num_pages=np.int64(2), page_size=np.int32(1), gpu_memory_utilization=1, seed=None, fusions="rope",
                          cudagraph_capture_sizes=(1, 2), kv_cache_dtype=torch.int8, async_stepping=False)
    assert type(config.num_pages) is type(config.page_size) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_unknown_names() -> None:
    for make in (EngineConfig.of, lambda options: quire.Engine(torch.nn.Linear(2, 2), **options)):
        with pytest.raises(TypeError, match="quire.Engine has no option pages, seqs; it has attention, page_size, num_pages, "):
            make({"pages": 3, "page_size": 4, "seqs": 1})
    with pytest.raises(ValueError, match="quire.Engine has no option pages"):  # one message, and no traceback
        check_options({"pages": 3})


def test_users_and_type_checkers_see_the_options() -> None:
    parameters = inspect.signature(quire.Engine).parameters
    assert list(parameters) == ["model", "tokenizer", *NAMES]
    assert {n: parameters[n].default for n in NAMES} == {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    described = inspect.getdoc(quire.Engine)
    assert "{options}" not in described and option_help() in described
    assert "    page_size: tokens per page of the KV cache (default: 16)." in described.splitlines()
    hints = [typing.get_type_hints(each, localns={"torch": torch}) for each in (EngineConfig, EngineOptions)]
    assert hints[0] == hints[1] and not EngineOptions.__total__


def test_options_of_the_passes() -> None:
    auto, chosen = EngineConfig(), EngineConfig(compiler="inductor", fusions="rope, projections")
    assert (auto.compile_options(CPU).compiler, auto.compile_options(CPU).fusions) == ("eager", "none")
    assert (auto.compile_options(CUDA).compiler, auto.compile_options(CUDA).fusions) == ("inductor", "all")
    for device in (CPU, CUDA):
        assert chosen.compile_options(device).compiler == "inductor"
    config = EngineConfig(attention="triton", page_size=8, kv_layout="HND", kv_cache_dtype="fp8", max_model_len=64)
    options = config.compile_options(CPU)
    assert (options.attention, options.page_size, options.layout, options.max_model_len) == ("triton", 8, "HND", 64)
    assert options.kv_cache_dtype is torch.float8_e4m3fn and options.fixed_kv_scale is False
    assert EngineConfig(kv_cache_dtype="fp8", kv_scales={0: (1, 0.5)}).compile_options(CPU).fixed_kv_scale


def test_kv_dtype() -> None:
    assert kv_dtype("auto") is None
    assert kv_dtype("bfloat16") is kv_dtype(torch.bfloat16) is torch.bfloat16
    assert kv_dtype("float8_e4m3fn") is kv_dtype("fp8") is kv_dtype("fp8_e4m3") is torch.float8_e4m3fn
    assert kv_dtype("fp8_e5m2") is torch.float8_e5m2 and kv_dtype("int8") is torch.int8
    for name in ("float7", "nn", "Tensor", "", "fp4"):
        with pytest.raises(ValueError, match=f"kv_cache_dtype '{name}' is not 'auto', a torch dtype such as"):
            kv_dtype(name)


@pytest.mark.parametrize(("text", "parsed"), [
    ("num_pages=512", ("num_pages", 512)), ("attention=triton", ("attention", "triton")),
    ("fusions=['rope']", ("fusions", ["rope"])),
    ("kv_scales=0.02", ("kv_scales", 0.02)), ("kv_scales={0: (0.1, 2)}", ("kv_scales", {0: (0.1, 2)})),
    ("num_pages=None", ("num_pages", None)), ("attention=a=b", ("attention", "a=b")),
])
def test_parse_option(text, parsed) -> None:
    assert parse_option(text) == parsed


@pytest.mark.parametrize("text", ["num_pages", "=3", "a b=3"])
def test_parse_option_refuses(text) -> None:
    with pytest.raises(ValueError, match="is not of the form key=value"):
        parse_option(text)

"""What the engine reads off a model and its tokenizer."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from quire.graph_runner.loading import (
    DEFAULT_LENGTH,
    TINY_MODEL,
    check_arguments,
    default_compiler,
    eos_token_ids,
    kv_dtype,
    load,
    model_length,
    progress_bar,
    vocab_size,
)
from quire.graph_runner.step_buffers import BatchShape
from tests.tiny import load_model, load_tokenizer

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def with_config(**attributes) -> nn.Module:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**attributes)
    return model


@pytest.mark.parametrize("path", [str(TINY_MODEL), TINY_MODEL], ids=["str", "Path"])
def test_load_a_path(path) -> None:
    model, tokenizer = load(path, None)
    assert not model.training and model.dtype == torch.float32
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert tokenizer("The cat")["input_ids"] == load_tokenizer()("The cat")["input_ids"]
    ours = object()
    assert load(path, ours, dtype=torch.bfloat16)[1] is ours


def test_load_a_model() -> None:
    model, tokenizer = nn.Linear(2, 2), object()
    assert load(model, tokenizer) == (model, tokenizer)
    assert load(model, None) == (model, None)


def test_load_without_tokenizer_files(tmp_path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    assert load(tmp_path, None)[1] is None


def test_load_errors(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no model at /no/such/place: expected a folder with config.json"):
        load("/no/such/place", None)
    with pytest.raises(FileNotFoundError, match="no model at .*: expected a folder with config.json"):
        load(tmp_path, None)
    with pytest.raises(ValueError, match="Identity has no parameters"):
        load(nn.Identity(), None)


def test_shipped_files_need_no_network_and_no_code() -> None:
    assert {p.name for p in TINY_MODEL.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not list(TINY_MODEL.glob("*.py"))
    assert sum(p.stat().st_size for p in TINY_MODEL.iterdir()) < 10 * 2**20


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(num_pages=0), "num_pages: a KV cache needs at least 2 pages .page 0 is the null page., got 0"),
    (dict(num_pages=-5), "num_pages: a KV cache needs at least 2 pages .*, got -5; None is for as many as fit"),
    (dict(num_pages=10.5), "num_pages must be an integer, got 10.5"),
    (dict(page_size=1.5), "page_size must be an integer, got 1.5"),
    (dict(page_size=0), "page_size must be at least 1, got 0"),
    (dict(max_num_seqs="4"), "max_num_seqs must be an integer, got '4'"),
    (dict(max_num_seqs=True), "max_num_seqs must be an integer, got True"),
    (dict(max_model_len=100.5), "max_model_len must be an integer, got 100.5"),
    (dict(seed="x"), "seed must be an integer, got 'x'"),
    (dict(async_stepping=5), "async_stepping must be True, False, or None for what suits the device; got 5"),
    (dict(tokenizer="foo"), "tokenizer must be an object with a decode method, such as .*, got 'foo'"),
    (dict(tokenizer=dict), "tokenizer must be an object with a decode method, .*, got \"<class 'dict'>\"; for token ids alone"),
    (dict(gpu_memory_utilization="0.9"), r"gpu_memory_utilization is a share of the memory, in \(0, 1\]; got '0.9'"),
    (dict(gpu_memory_utilization=float("nan")), "gpu_memory_utilization is a share of the memory, .*; got nan"),
])
def test_bad_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_arguments(**dict(gpu_memory_utilization=0.9) | arguments)


def test_good_arguments() -> None:
    check_arguments(0.9)
    check_arguments(1, load_tokenizer(), async_stepping=True, seed=-3, num_pages=np.int64(2), page_size=np.int32(1),
                    max_num_seqs=1, max_model_len=100, prefill_chunk_size=None)


@pytest.mark.parametrize(("attributes", "asked", "length"), [
    (dict(max_position_embeddings=100), None, 100), (dict(max_position_embeddings=100), 40, 40),
    (dict(n_positions=70), None, 70), (dict(max_seq_len=50), None, 50), (dict(n_ctx=30), None, 30),
    (dict(max_position_embeddings=None, n_positions=60), None, 60), ({}, None, DEFAULT_LENGTH), ({}, 9999, 9999),
])
def test_model_length(attributes, asked, length) -> None:
    assert model_length(with_config(**attributes), asked) == length


def test_model_length_of_real_configs() -> None:
    assert model_length(load_model(), None) == 1024
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=48))
    assert model_length(gpt2, None) == 48
    assert model_length(nn.Linear(2, 2), None) == DEFAULT_LENGTH


@pytest.mark.parametrize(("asked", "message"), [
    (1, r"max_model_len must be at least 2 \(a prompt token and a generated one\), got 1"),
    (-3, "max_model_len must be at least 2"),
    (101, "max_model_len=101, but the model has 100 positions"),
])
def test_bad_model_length(asked, message) -> None:
    with pytest.raises(ValueError, match=message):
        model_length(with_config(max_position_embeddings=100), asked)


def test_vocab_size() -> None:
    model = load_model()
    assert vocab_size(model) == 1848
    model.resize_token_embeddings(1900)
    assert vocab_size(model) == 1900
    assert vocab_size(nn.Sequential(nn.Embedding(64, 8), nn.Embedding(300, 8), nn.Linear(8, 8))) == 300
    with pytest.raises(ValueError, match="Linear has no embedding; quire cannot tell its vocabulary"):
        vocab_size(nn.Linear(2, 2))


def test_eos_token_ids() -> None:
    """The generation config counts before the config, and that before the tokenizer; an id or several."""
    tokenizer = SimpleNamespace(eos_token_id=5)
    model = with_config(eos_token_id=[3, 4])
    assert eos_token_ids(model, tokenizer) == {3, 4}
    model.generation_config = SimpleNamespace(eos_token_id=0)
    assert eos_token_ids(model, tokenizer) == {0}
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert eos_token_ids(model, tokenizer) == {5}
    assert eos_token_ids(model, None) == eos_token_ids(nn.Linear(2, 2), None) == frozenset()
    assert eos_token_ids(load_model(), None) == {0}


def test_kv_dtype() -> None:
    assert kv_dtype("auto") is None
    assert kv_dtype("bfloat16") is kv_dtype(torch.bfloat16) is torch.bfloat16
    assert kv_dtype("float8_e4m3fn") is kv_dtype("fp8") is kv_dtype("fp8_e4m3") is torch.float8_e4m3fn
    assert kv_dtype("fp8_e5m2") is torch.float8_e5m2 and kv_dtype("int8") is torch.int8
    for name in ("float7", "nn", "Tensor", "", "fp4"):
        with pytest.raises(ValueError, match=f"kv_cache_dtype '{name}' is neither 'auto' nor a torch dtype such as"):
            kv_dtype(name)


def test_default_compiler() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert (default_compiler("auto", cpu), default_compiler("auto", cuda)) == ("eager", "inductor")
    assert default_compiler("inductor", cpu) == "inductor" and default_compiler("eager", cuda) == "eager"


def test_progress_bar(caplog) -> None:
    buckets = [BatchShape(4, 4), BatchShape(1, 1)]
    with caplog.at_level(logging.INFO):
        assert list(progress_bar(buckets, "Capturing")) == buckets

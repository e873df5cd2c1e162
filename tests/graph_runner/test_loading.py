"""What the engine reads off a model and its tokenizer."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, T5Config

from quire import Engine, UnsupportedAttention
from quire.graph_runner import loading
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.step_buffers import BatchShape
from tests.tiny import load_model, load_tokenizer

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def with_config(**attributes) -> nn.Module:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**attributes)
    return model


@pytest.mark.parametrize("path", [str(loading.TINY_MODEL), loading.TINY_MODEL], ids=["str", "Path"])
def test_load_a_path(path) -> None:
    model, tokenizer = loading.load(path, None)
    assert not model.training and model.dtype == torch.float32
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert tokenizer("The cat")["input_ids"] == load_tokenizer()("The cat")["input_ids"]
    ours = load_tokenizer()
    assert loading.load(path, ours, dtype=torch.bfloat16)[1] is ours


def test_load_a_model(tmp_path) -> None:
    model, tokenizer = nn.Linear(2, 2), load_tokenizer()
    assert loading.load(model, tokenizer) == (model, tokenizer)
    assert loading.load(model, None) == (model, None)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    assert loading.load(tmp_path, None)[1] is None


def test_load_errors(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no model at /no/such/place: expected a folder with config.json"):
        loading.load("/no/such/place", None)
    with pytest.raises(FileNotFoundError, match="no model at .*: expected a folder with config.json"):
        loading.load(tmp_path, None)
    with pytest.raises(ValueError, match="Identity has no parameters"):
        loading.load(nn.Identity(), None)


TINY = dict(vocab_size=64, d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=2, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)


@pytest.mark.parametrize(("kind", "architecture", "message"), [
    ("t5", "T5ForConditionalGeneration", "t5 is an encoder-decoder model; quire serves decoder-only"),
    ("whisper", "WhisperForConditionalGeneration", "whisper is an encoder-decoder model"),
    ("llava", "LlavaForConditionalGeneration", "is a llava, which transformers' AutoModelForCausalLM does not know; load the"),
    ("llama", "LlamaForSequenceClassification", "was saved as LlamaForSequenceClassification, without a language-model head"),
    ("llama", "LlamaForTokenClassification", "was saved as LlamaForTokenClassification, without"),
    ("llama", "LlamaModel", "was saved as LlamaModel, without a language-model head; quire serves causal LMs"),
])
def test_checkpoints_of_other_models(kind, architecture, message, tmp_path) -> None:
    """Refused in one line, before any weights are read."""
    config = AutoConfig.for_model(kind, **(TINY if kind in ("t5", "whisper") else {}))
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedAttention, match=message) as caught:
        loading.load(tmp_path, None)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_weights_that_are_missing(tmp_path) -> None:
    """transformers makes them random, and says so in a log."""
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    kept = {name: x for name, x in weights.items() if name not in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 2 of the weights .* random: lm_head.weight, model.layers.0.mlp.up"):
        loading.load(tmp_path, None)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="are incomplete or not a safetensors file"):
        loading.load(tmp_path, None)


def test_checkpoints_of_causal_lms(tmp_path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    for names in (None, ["MyOwnForCausalLM"], ["LlamaForCausalLM"], "LlamaForCausalLM"):
        config = AutoConfig.from_pretrained(tmp_path)
        config.architectures = names
        config.save_pretrained(tmp_path)
        assert loading.load(tmp_path, None)[0].num_parameters() > 0


@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaModel"])
def test_models_without_a_language_model_head(kind) -> None:
    with pytest.raises(UnsupportedAttention, match=f"{kind} has no language-model head; quire serves causal LMs"):
        Engine(getattr(transformers, kind)(LlamaConfig(**SIZES)), num_pages=8)


def test_the_config_is_checked_before_the_vocabulary() -> None:
    """Of an encoder-decoder model, some of which have no input embeddings to ask for."""
    sizes = {k: v for k, v in TINY.items() if k in T5Config().to_dict()}
    model = transformers.AutoModelForSeq2SeqLM.from_config(T5Config(**sizes))
    model.get_input_embeddings = None
    with pytest.raises(UnsupportedAttention, match="t5 is an encoder-decoder model"):
        Engine(model, num_pages=8)


def test_shipped_files_need_no_network_and_no_code() -> None:
    assert {p.name for p in loading.TINY_MODEL.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not list(loading.TINY_MODEL.glob("*.py"))
    assert sum(p.stat().st_size for p in loading.TINY_MODEL.iterdir()) < 10 * 2**20


@pytest.mark.parametrize(("tokenizer", "message"), [
    ("foo", "tokenizer must be an object with a decode method, such as .*, got 'foo'"),
    (dict, "tokenizer must be an object with a decode method, .*, got \"<class 'dict'>\"; omit it to use token ids only"),
])
def test_bad_tokenizer(tokenizer, message) -> None:
    with pytest.raises(ValueError, match=message):
        loading.load(nn.Linear(2, 2), tokenizer)


@pytest.mark.parametrize(("attributes", "asked", "length"), [
    (dict(max_position_embeddings=100), None, 100), (dict(max_position_embeddings=100), 40, 40),
    (dict(n_positions=70), None, 70), (dict(max_seq_len=50), None, 50), (dict(n_ctx=30), None, 30),
    (dict(max_position_embeddings=None, n_positions=60), None, 60), ({}, None, loading.DEFAULT_LENGTH), ({}, 9999, 9999),
])
def test_model_length(attributes, asked, length) -> None:
    assert loading.model_length(with_config(**attributes), asked) == length


def test_model_length_of_real_configs() -> None:
    assert loading.model_length(load_model(), None) == 1024
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=48))
    assert loading.model_length(gpt2, None) == 48
    assert loading.model_length(nn.Linear(2, 2), None) == loading.DEFAULT_LENGTH


def test_limits() -> None:
    """Requests fit the cache, and steps are no larger than all requests together."""
    model = with_config(max_position_embeddings=100)
    config = loading.limited(EngineConfig(max_num_seqs=3), model)
    assert (config.max_model_len, config.max_num_batched_tokens) == (100, 300)
    config = loading.limited(EngineConfig(num_pages=5, page_size=4, max_num_batched_tokens=7), model)
    assert (config.max_model_len, config.max_num_batched_tokens) == (16, 7)


def test_vocab_size() -> None:
    model = load_model()
    assert loading.vocab_size(model) == 1848
    model.resize_token_embeddings(1900)
    assert loading.vocab_size(model) == 1900
    with pytest.raises(ValueError, match="Linear has no embedding, so its vocabulary size is unknown"):
        loading.vocab_size(nn.Linear(2, 2))


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("head", [32, 40], ids=["plain", "padded"])
def test_vocab_size_beside_a_table_of_positions(block: int, head: int) -> None:
    """Which may be longer or shorter. Of a padded head nothing shows it but the trace."""
    def model(*modules: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Embedding(block, 8), nn.Embedding(32, 8), nn.Linear(8, 8), *modules)

    assert loading.vocab_size(model(nn.Linear(8, head), nn.Linear(8, 8))) == (32 if head == 32 else max(32, block))
    tied = model(nn.Linear(8, 32), nn.Linear(8, block))
    tied[3].weight = tied[1].weight
    assert loading.vocab_size(tied) == 32
    named = model()
    named.config = SimpleNamespace(vocab_size=32)
    assert loading.vocab_size(named) == 32
    named.get_input_embeddings = lambda: named[1]
    named.config.vocab_size = 64
    assert loading.vocab_size(named) == 32


def test_eos_token_ids() -> None:
    """The generation config counts before the config, and that before the tokenizer; an id or several."""
    tokenizer = SimpleNamespace(eos_token_id=5)
    model = with_config(eos_token_id=[3, 4])
    assert loading.eos_token_ids(model, tokenizer) == {3, 4}
    model.generation_config = SimpleNamespace(eos_token_id=0)
    assert loading.eos_token_ids(model, tokenizer) == {0}
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert loading.eos_token_ids(model, tokenizer) == {5}
    assert loading.eos_token_ids(model, None) == loading.eos_token_ids(nn.Linear(2, 2), None) == frozenset()
    assert loading.eos_token_ids(load_model(), None) == {0}


def test_progress_bar(caplog) -> None:
    buckets = [BatchShape(4, 4), BatchShape(1, 1)]
    with caplog.at_level(logging.INFO):
        assert list(loading.progress_bar(buckets, "Capturing")) == buckets

"""A model, prompts and what transformers makes of them, for the files that do not bring their own."""

import pytest
import transformers

from quire.graph_runner.engine import Engine
from tests.tiny import GREEDY, PROMPTS, SAMPLED, hf_greedy, load_model, load_tokenizer, tokens


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def one_layer():
    """Quick to trace."""
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=1024)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer(p)["input_ids"] for p in PROMPTS]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """transformers' greedy continuation of each prompt."""
    return [hf_greedy(model, p, GREEDY.max_tokens) for p in prompts]


@pytest.fixture(scope="module")
def sampled(model, prompts):
    """What each prompt gives when it is sampled alone."""
    with Engine(model, num_pages=120, max_num_seqs=1, max_model_len=300, async_stepping=False) as engine:
        return [tokens(engine.generate([p], SAMPLED))[0] for p in prompts]

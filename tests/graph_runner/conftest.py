"""A model, prompts and what transformers makes of them, for the files that do not bring their own."""

import signal
from collections.abc import Iterator

import pytest

from quire.graph_runner.engine import Engine
from tests import tiny


@pytest.fixture(scope="module")
def model():
    return tiny.load_model(num_layers=1)


@pytest.fixture(scope="module")
def one_layer():
    return tiny.small_llama()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.load_tokenizer()


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompt_ids()


@pytest.fixture(scope="module")
def expected(model):
    """transformers' greedy continuation of each prompt."""
    return tiny.greedy_continuations(model.config.num_hidden_layers)


@pytest.fixture(scope="module")
def sampled(model):
    """What each prompt gives when it is sampled alone."""
    return tiny.sampled_continuations(model.config.num_hidden_layers)


@pytest.fixture(scope="module")
def shared_engine(model, tokenizer):
    with Engine(model, tokenizer, num_pages=120, max_num_seqs=8, max_model_len=300, async_stepping=False,
                cudagraph_capture_sizes=[1, 2, 4, 8]) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """One engine for all tests that do not need their own; every test must leave it idle."""
    yield shared_engine
    tiny.assert_idle(shared_engine)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own reaction to a Ctrl-C; processes in the background, as pytest-xdist's workers may be, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

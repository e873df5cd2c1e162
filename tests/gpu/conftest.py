"""Marks for every test in this folder; the model that ships with quire on the GPU, prompts, and what transformers makes of
them; float32 products without TF32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiny import GREEDY, PROMPTS, hf_greedy, load_model, load_tokenizer


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)
    item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("cuda")


@pytest.fixture(scope="module")
def half() -> Any:
    return load_model("cuda", torch.bfloat16)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [tokenizer(p)["input_ids"] for p in PROMPTS]


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    return [hf_greedy(model, p, GREEDY.max_tokens) for p in prompts]


@pytest.fixture(scope="module")
def long_prompt(tokenizer) -> list[int]:
    """940 tokens of plain text."""
    ids = tokenizer(" ".join(PROMPTS) + "\n")["input_ids"]
    return (ids * (940 // len(ids) + 1))[:940]

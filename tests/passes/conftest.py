"""Each test of a pass starts with an empty Dynamo cache: it counts traces, and traces one forward of many models."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

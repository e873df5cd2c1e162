"""Each test of a pass starts with an empty Dynamo cache (it counts traces, and traces one forward of many models), and with the
same random weights whatever ran before it: the bounds on errors are close to what rounding makes of some weights."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()

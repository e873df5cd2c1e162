"""The verdict of a trial is kept with the trace: a start of the same model does not run it again, and one of any other does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from quire import Engine, UnsupportedAttention
from quire.graph_runner import kept_trial
from quire.passes.capture.paged_model import PagedModel
from tests.tiny import small_llama

pytestmark = pytest.mark.usefixtures("tokens_unchecked")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "1")
    return tmp_path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], int]:
    """How often an engine of a model, when it starts, runs the model's graph in float32."""
    count, before = [0], PagedModel.in_mode

    def counted(self: PagedModel, *args: Any) -> torch.Tensor:
        count[0] += 1
        return before(self, *args)

    def of(model: Any, **options: Any) -> int:
        count[0] = 0
        with Engine(model, attention="torch_native", num_pages=16, compiler="eager", **options):
            return count[0]

    monkeypatch.setattr(PagedModel, "in_mode", counted)
    return of


def test_the_same_model_has_one_trial(runs: Callable[[Any], int]) -> None:
    """With the model's own weights, in another object; with others it is tried again, and both are known then."""
    model = small_llama().bfloat16()
    again = small_llama().bfloat16()
    again.load_state_dict(model.state_dict())
    assert runs(model) > 0 and runs(again) == 0
    again.lm_head.weight.data[3, 5] += 1
    assert runs(again) > 0
    assert runs(again) == runs(model) == 0


def test_another_length_has_another_trial(runs: Callable[..., int]) -> None:
    model = small_llama().bfloat16()
    assert runs(model) > 0 and runs(model, max_model_len=32) > 0


def test_code_of_the_users_is_asked_each_time(runs: Callable[[Any], int]) -> None:
    """Its hook may do something else for one token, or with a cache, and no logits of a whole sequence show it."""
    model = small_llama().bfloat16()
    model.model.norm.register_forward_hook(lambda module, args, output: output * 2)
    assert runs(model) > 0 and runs(model) > 0


class Activation:
    """Of the user's; no function, and no module."""

    switched = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x) * x
        return x.flip(-1) * 3 if x.shape[1] == 1 and self.switched else x


def test_an_object_of_the_users_is_asked_each_time(runs: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> Any:
        found = small_llama().bfloat16()
        for layer in found.model.layers:
            del layer.mlp._modules["act_fn"]
            layer.mlp.act_fn = Activation()
        return found

    assert runs(model()) > 0
    monkeypatch.setattr(Activation, "switched", True)
    with pytest.raises(UnsupportedAttention, match="for a row of one token|where it has a KV cache"):
        runs(model())


def test_one_token_alone_is_compared(runs: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = small_llama().bfloat16(), PagedModel.by_itself
    assert runs(model) > 0
    monkeypatch.setattr(PagedModel, "by_itself", lambda self, ids, *at: own(self, ids, *at) * (1.5 if len(ids) == 1 else 1))
    with pytest.raises(UnsupportedAttention, match="for a row of one token"):
        runs(model)


def test_other_code_makes_another_trial(runs: Callable[[Any], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a later release, which may refuse more."""
    model = small_llama().bfloat16()
    assert runs(model) > 0
    for file in Path(kept_trial.__file__).parent.glob("*.py"):
        (tmp_path / file.name).write_bytes(file.read_bytes() + b"# changed" * (file.name == "packing_check.py"))
    monkeypatch.setattr(kept_trial, "__file__", str(tmp_path / "kept_trial.py"))
    assert runs(model) > 0 and runs(model) == 0


def test_a_forward_that_computes_something_else_is_found(runs: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where nothing that the trace depends on has changed, as far as it knows."""
    model = small_llama().bfloat16()
    assert runs(model) > 0
    own = PagedModel.by_itself
    monkeypatch.setattr(PagedModel, "by_itself", lambda self, *args: own(self, *args) * 1.5)
    with pytest.raises(UnsupportedAttention, match="other logits paged than by the model's own forward"):
        runs(model)


def test_a_model_that_is_refused_is_refused_again(runs: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch) -> None:
    def by_length(x: torch.Tensor) -> torch.Tensor:
        return x - x.flip(-1) if x.shape[1] == 1 else x

    monkeypatch.setattr(modeling_llama.LlamaMLP, "act_fn", property(lambda self: by_length), raising=False)
    for _ in range(2):
        model = small_llama().bfloat16()
        for layer in model.model.layers:
            del layer.mlp._modules["act_fn"]
        with pytest.raises(UnsupportedAttention, match="for a row of one token"):
            runs(model)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", None])
def test_a_broken_file(runs: Callable[[Any], int], folder: Path, content: bytes | None) -> None:
    """``None``: a folder in the place of the file. The engine starts, after a trial."""
    model = small_llama().bfloat16()
    assert runs(model) > 0
    (file,) = (folder / "traces").glob("*.trials")
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    assert runs(model) > 0


def test_in_float32_all_is_compared_each_time(runs: Callable[[Any], int], folder: Path) -> None:
    """There the trial is of the model as served."""
    runs(small_llama())
    assert list((folder / "traces").glob("*.pickle")) and not list((folder / "traces").glob("*.trials"))


def test_without_traces_on_disk(runs: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "0")
    model = small_llama().bfloat16()
    assert runs(model) > 0 and runs(model) > 0

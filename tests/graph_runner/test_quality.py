"""``quire calibrate`` and ``quire quality``: channels as measured by hand, and texts that decode alike where all keys count."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backends import torch_native
from quire.attn_ops.calibration import ChannelMoments, recorder
from quire.attn_ops.conformance.batches import compare, lay_out, run
from quire.graph_runner import cli

SITE = AttentionSite(layer=0, num_heads=4, num_kv_heads=2, head_dim=8, head_dim_v=8, dtype=torch.float32, scale=0.5)


def test_channels_are_ranked_by_what_they_add_to_scores() -> None:
    """Of live tokens only, and with the output as without measuring."""
    moments = ChannelMoments()
    backend = recorder(torch_native.BACKEND, moments)
    batch = lay_out(SITE, [5, 1], [5, 9], page_size=4, pad=(3, 1))
    compare(run(backend, batch), batch)
    q, k = batch.q[:6].double(), batch.new_k[:6].double()
    wanted = torch.zeros(2, 8, dtype=torch.float64)
    for head in range(4):
        wanted[head // 2] += q[:, head].square().sum(0)
    wanted = (wanted * k.square().sum(0)).sqrt()
    torch.testing.assert_close(moments.importance(0), wanted)
    assert moments.tokens == 6
    ranked = moments.ranked()[0]
    assert all((wanted[h][ranked[h]].diff() <= 0).all() and sorted(ranked[h]) == list(range(8)) for h in range(2))
    moments.reset()
    assert moments.tokens == 0 and not moments.importance(0).any()


def test_only_plain_backends_can_be_measured_through() -> None:
    with pytest.raises(ValueError, match="without state and plan, which torch_native is not"):
        recorder(dataclasses.replace(torch_native.BACKEND, plan=lambda *args: None), ChannelMoments())


def drift(capsys: pytest.CaptureFixture[str], names: list[str], *options: str) -> list[float]:
    """What ``quire quality`` prints for each backend, by which its log probabilities are off."""
    command = ["quality", *options, "--length", "24"]
    assert cli.main(command + [part for name in names for part in ("--attention", name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": p")[0] for line in lines] == names
    assert all(("prefilled positions" in line) == ("--prefill" in options) for line in lines)
    return [float(line.rpartition(" ")[2]) for line in lines]


@pytest.mark.parametrize("length", ["0", "1", "5000"])
def test_lengths_that_the_model_has_not(length: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["calibrate", "--out", str(tmp_path / "x")], ["quality", "--prefill", "--attention", "torch_native"]):
        assert cli.main([*command, "--length", length]) == 2
        assert f"texts of {length} tokens: the model takes 2 to" in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_as_long_as_the_model(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", tmp_path / "channels.json"
    text.write_text("Once upon a time, there was a fox who liked soup. " * 100)
    assert cli.main(["calibrate", "--text", str(text), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["tokens"] > 500
    assert cli.main(["quality", "--prefill", "--text", str(text), "--attention", "torch_native"]) == 0


@pytest.mark.slow
def test_the_commands(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """Few keys change the model's log probabilities; all keys leave them. So it is in a sparse prefill."""
    text, out = tmp_path / "text", tmp_path / "channels.json"
    text.write_text("Once upon a time, there was a fox who liked soup. " * 6)
    assert cli.main(["calibrate", "--text", str(text), "--length", "24", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert sorted(found["channels"]) == ["0", "1", "2", "3"]
    assert f"measured on {found['tokens']} tokens" in capsys.readouterr().out
    for some, options in (([f"double_sparsity:64:0:16:{out}", f"double_sparsity:2:0:16:{out}"], ()),
                          (["dual_chunk:64:16:8:4:30:1", "dual_chunk:64:16:8:4:1:1"], ("--prefill",))):
        plain, whole, sparse = drift(capsys, ["torch_native", *some], *options, "--text", str(text))
        assert plain == 0 and whole < 1e-4 < 1e-2 < sparse

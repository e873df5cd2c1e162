"""The command line, with the shipped model on the CPU."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.graph_runner.cli import main
from quire.graph_runner.loading import TINY_MODEL
from tests.tiny import hf_greedy, load_model, load_tokenizer

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the first layer of the shipped model, which starts sooner."""
    path = tmp_path_factory.mktemp("model")
    load_model(num_layers=1).save_pretrained(path)
    load_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def said_by_small() -> str:
    """Its continuation of "The owl is" by eight tokens."""
    tokenizer = load_tokenizer()
    return tokenizer.decode(hf_greedy(load_model(num_layers=1), tokenizer("The owl is").input_ids, 8))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And what a command does to a logger, for the rest of its process, ends with the test."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    yield
    logging.getLogger("quire.graph_runner.engine").setLevel(logging.NOTSET)


def test_help_needs_no_torch_and_names_every_command() -> None:
    code = "import sys\nfrom quire.graph_runner.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    for name in ("generate", "explain", "backends", "bench"):
        assert f"\n    {name}" in done.stdout


@pytest.mark.parametrize(("command", "words"), [
    ("generate", ("--demo", "--model", "--attention", "--max-tokens", "--temperature", "--top-k", "--top-p", "--seed",
                  "--page-size", "--no-stream")),
    ("explain", ("--model", "--config", "--attention", "--page-size")),
    ("backends", ("--device",)),
    ("bench", ("--model", "--layers", "--systems", "--vs", "--engine", "--out", "--plots", "--against", "--tolerance")),
])
def test_help_of_a_command(command: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert not [word for word in words if word not in said]


def test_one_prompt_streams_plainly_into_a_log(small: str, said_by_small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", small, "--max-tokens", "8", "The owl is", "--no-stream"]) == 0
    assert capsys.readouterr().out == f"The owl is{said_by_small}\n"
    assert main(["generate", "--model", small, "--max-tokens", "8", "The owl is"]) == 0
    said = capsys.readouterr()
    assert said.out == f"The owl is{said_by_small}\n", "what a script reads is the text alone"
    summary = said.err.splitlines()[-1]
    assert summary.startswith("1 request, 3 prompt and 8 new tokens; prefill ")
    assert "tokens/s; attention torch_native on cpu, page size 16; CUDA graphs: none on a CPU" in summary


@pytest.mark.slow  # the whole model; test_panels_on_a_terminal has several prompts
def test_the_demo_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--demo", "--max-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("LlamaForCausalLM: 4 attention sites\n")
    assert "torch_native_paged_attention" in out
    assert "\n[1] Once upon a time, there was a little" in out and "\n[6] The moon is up," in out
    assert "decode" in err.splitlines()[-1]


def test_panels_on_a_terminal(small: str, said_by_small: str, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    prompts = ["The owl is", "Dear Anna,"]
    assert main(["generate", "--model", small, "--max-tokens", "8", *prompts, "--engine", "num_pages=32"]) == 0
    said = capsys.readouterr()
    assert "╭─" in said.out and said_by_small in said.out and "length" in said.out
    assert "2 requests" in said.err


def test_json_version_and_log(small: str, said_by_small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", small, "--json", "-v", "--max-tokens", "4", "The owl is", "word " * 300, "--engine",
                 "num_pages=10"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [o["finish_reason"] for o in found["outputs"]] == ["length", "error"]
    assert said_by_small.startswith(found["outputs"][0]["text"]) and found["stats"]["generated_tokens"] == 4
    assert "INFO quire.graph_runner.model_runner: attention: torch_native" in said.err
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"quire {quire.__version__}\n"


def test_long_errors_are_shortened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise quire.UnsupportedAttention("\n".join(f"reason {i}" for i in range(40)))

    monkeypatch.setattr("quire.graph_runner.loading.load", refuses)
    assert main(["generate", "hi"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 9 and said[-1] == "... and 32 more lines; --traceback shows all"


def test_a_prompt_that_fails_is_named_and_the_others_run(small: str, said_by_small: str,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max-tokens", "8", "The owl is", "word " * 300, "--engine", "num_pages=10"]
    assert main(["generate", "--model", small, *arguments]) == 1
    said = capsys.readouterr()
    assert f"[1] The owl is{said_by_small}\n" in said.out
    assert "quire: prompt 2: the prompt has " in said.err


def test_explain_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    said = capsys.readouterr().out
    assert "0-3    model.layers.*.self_attn  interface  GQA 4:2x64, float32" in said
    assert said.endswith("attention backend: torch_native\n")
    assert main(["backends", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "torch_native" in said and "flashinfer: not usable on cpu" in said


def test_explain_a_config_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    text = (TINY_MODEL / "config.json").read_text()
    config.write_text(text.replace('"num_hidden_layers": 4', '"num_hidden_layers": 2'))
    assert main(["explain", "--config", str(config), "--all"]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM: 2 attention sites" in said
    assert "1      model.layers.1.self_attn  interface  GQA 4:2x64, float32" in said
    assert main(["explain", "--config", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["supported"] and found["backend"] == "torch_native" and [s["layer"] for s in found["sites"]] == [0, 1]
    assert main(["explain", "--config", str(config), "--attention", "flashinfer"]) == 1
    assert "refused: attention='flashinfer' cannot serve this model" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["generate", "hi", "--model", "nowhere"], "no model at nowhere"),
    (["generate", "hi", "--attention", "nope"], "unknown attention backend 'nope'; there are: auto, "),
    (["generate", "hi", "--model", "SMALL", "--attention", "flashinfer"],
     "attention='flashinfer' cannot serve this model on cpu"),
    (["generate", "hi", "--temperature", "-1"], "temperature must be"),
    (["generate", "hi", "--engine", "pages=3"], "quire.Engine has no option pages; it has attention, "),
    (["generate", "hi", "--engine", "num_pages=abc"], "num_pages must be an integer or None, got 'abc'"),
    (["generate", "hi", "--engine", "cudagraph_capture_sizes=[1,'x']"],
     "cudagraph_capture_sizes must be a list of integers or 'sglang' or 'vllm' or 'powers' or None, got [1, 'x']"),
    (["generate", "hi", "--model", "SMALL", "--engine", "attention=flashinfer"],
     "attention='flashinfer' cannot serve this model on cpu"),
    (["generate", "hi", "--engine", "attention=triton", "--attention", "auto"],
     "--attention auto and --engine attention=triton differ; give one of them"),
    (["generate", "hi", "--engine", "page_size=8", "--page-size", "16"],
     "--page-size 16 and --engine page_size=8 differ; give one of them"),
    (["generate", "--model", str(TINY_MODEL)], "nothing to continue"),
    (["explain", "--device", "cuda"], "--device needs --config: "),
    (["explain", "--page-size", "0"], "page_size must be at least 1, got 0"),
    (["explain", "--page-size", "-3", "--config", str(TINY_MODEL / "config.json")], "page_size must be at least 1, got -3"),
    (["explain", "--config", "nowhere.json"], "no config file at nowhere.json"),
    (["bench", "--model", "nothing"], "'nothing' is neither a shape (llama-8b, "),
    (["bench", "--model", "tiny", "--systems", "quire,other"], "unknown systems ['other']; there are: quire, "),
    (["bench", "--model", "tiny", "--context", "64"], "--context must be more than 64"),
    (["bench", "--model", "tiny", "--quantize", "int3"], "unknown quantization 'int3'; there are: int8wo, "),
    (["bench", "--model", "tiny", "--layers", "5"], "--layers 5, but the model has 4"),
    (["bench", "--model", "tiny", "--against", "nowhere.json"], "no result to compare with at nowhere.json"),
    (["bench", "--model", "tiny", "--dtype", "int8"], "--dtype 'int8' is not a floating-point torch dtype"),
    (["bench", "--model", "tiny", "--dtype", "fp8"], "--dtype 'fp8' is not a floating-point"),
    (["bench", "--model", "tiny", "--kv-cache-dtype", "fp4"], "kv_cache_dtype 'fp4' is not 'auto'"),
    (["bench", "--model", "tiny", "--kv-cache-dtype", "int8", "--engine", "kv_cache_dtype=fp8"],
     "the dtype of the KV cache is given twice"),
    # What would go unheeded.
    (["bench", "attention", "--heads", "8x64"], "--heads takes query heads/key heads x head dim such as 32/8x128"),
    (["bench", "attention", "--heads", "8/3x64"], "--heads takes"),
    (["bench", "attention", "--page-size", "0"], "--page-size and --scale must be at least 1"),
    (["bench", "attention", "--vs", "vllm", "--engine", "num_pages=3"], "--vs, --engine: not with the workload attention"),
    (["bench", "attention", "--kv-cache-dtype", "int8"], "--kv-cache-dtype: not with the workload attention"),
    (["bench", "attention", "--systems", "hf-eager"], "--systems: not with the workload attention"),
    (["bench", "attention", "--attention", "nope"], "unknown attention backend 'nope'"),
    (["bench", "decode", "--save"], "--save: not with the workload decode"),
    (["bench", "decode", "--page-size", "8"], "--page-size: not with the workload decode"),
    (["bench", "decode", "--context", "100,200"], "the workload decode takes one --context, got [100, 200]"),
    (["bench", "matrix", "--model", "tiny"], "--model: not with the workload matrix"),
    (["bench", "matrix", "--cells", "nothing"], "--cells nothing names no cell; there are: decode/1x1024"),
    (["bench", "matrix", "--models", "x"], "unknown models ['x']"),
    (["bench", "matrix", "--vs", "hf-eager"], "--vs hf-eager: the matrix runs systems step by step, which only quire, vllm"),
    (["bench", "decode", "--cells", "online"], "--cells: not with the workload decode"),
])
def test_errors_are_one_message_and_exit_code_2(arguments: list[str], message: str, small: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main([small if a == "SMALL" else a for a in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"quire {arguments[0]}: error: {message}")
    assert "Traceback" not in said and said.count("\n") < 10


@pytest.mark.parametrize("options", [["--engine", "page_size=8"], ["--page-size", "8"],
                                     ["--engine", "page_size=8", "--page-size", "8"]], ids=" ".join)
def test_engine_options_are_as_good_as_those_of_their_own(options: list[str], small: str,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--engine", "gpu_memory_utilization=1", "--engine", "cudagraph_capture_sizes=None", "--engine", "fusions=['rope']"]
    assert main(["generate", "--model", small, "--max-tokens", "2", "The owl is", *options, *more]) == 0
    assert "page size 8;" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "text", "message"), [
    ("model.safetensors", None, "model at {} cannot be loaded: Error no file named model.safetensors"),
    ("model.safetensors", "torn", "weights at {} are incomplete or not a safetensors file (Error while deserializing header"),
    ("config.json", "{nope", "model at {} cannot be loaded: It looks like the config file at "),
    ("config.json", '{"model_type": "llama", "hidden_size": "many"}',
     "model at {} cannot be loaded: Validation error for field 'hidden_size'"),
    ("tokenizer.json", "{nope", "model at {} cannot be loaded: Expecting property name"),
])
def test_a_model_that_cannot_be_loaded(file: str, text: str | None, message: str, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    (model / file).unlink()
    if text is not None:
        (model / file).write_text(text)
    assert main(["generate", "hi", "--model", str(model)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"quire generate: error: the {message.format(model)}")
    assert said.count("\n") == 1
    for command in (["quality", "--attention", "torch_native"], ["calibrate", "--out", str(tmp_path / "out")]):
        assert main([*command, "--model", str(model)]) == 2
        assert capsys.readouterr().err.startswith(f"quire {command[0]}: error: the {message.format(model)}")
    if file == "config.json":
        assert main(["explain", "--config", str(model / file)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"quire explain: error: the {message.format(model / file)}")


def test_an_error_of_our_own_shows_where_it_came_from(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("quire.graph_runner.engine.Engine.stream", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["generate", "hi", "--model", small])
    with pytest.raises(FileNotFoundError, match="no model at nowhere"):
        main(["generate", "hi", "--model", "nowhere", "--traceback"])


BACKENDS = "import sys\nfrom quire.graph_runner.cli import main\nsys.exit(main(['backends', '--device', 'cpu']))"


def test_output_that_nobody_reads_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", BACKENDS], stdout=gone, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 141 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(device: object) -> str:
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr("quire.attn_ops.registry.backends", broken)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main(["backends"])

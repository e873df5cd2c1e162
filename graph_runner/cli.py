"""quire: paged-KV attention, CUDA graphs and continuous batching for Hugging Face models.

Without --model the small model that ships with quire is used: no download, no GPU needed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import select
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quire.graph_runner.cli_display import Texts, stream_live, stream_plain

# Nothing heavy is imported at the top: `quire --help` must be quick.
DEMO = ("Once upon a time,", "The owl", "To make soup, you need", "Dear Anna,", '"Hello, Tom," said Mia.',
        "The moon is up,")
ERROR_LINES = 9
IN_JSON = ("index", "prompt", "text", "prompt_token_ids", "token_ids", "finish_reason", "stop_reason", "error")


def generate(args: argparse.Namespace) -> int:
    """``quire generate``. Exit code 1 if a prompt failed."""
    import torch
    from rich.console import Console

    from quire.graph_runner.engine import Engine
    from quire.graph_runner.loading import model_of_command
    from quire.graph_runner.sampling_params import SamplingParams

    options = _engine_options(args)
    prompts = [sys.stdin.read().rstrip("\n") if p == "-" else p for p in args.prompt]
    prompts += DEMO if args.demo else []
    if not prompts and args.model is not None:
        raise ValueError("nothing to continue: give one or more prompts (- reads one from standard input), or --demo")
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k,
                            top_p=args.top_p, seed=args.seed)
    if args.model is None or not sys.stderr.isatty():
        _no_loading_bar()
    model, tokenizer = model_of_command(args.model, text=True)
    if next(model.parameters()).is_cuda:
        print("setting up: trace, compile, capture CUDA graphs ...", file=sys.stderr)
    elif args.model is None:
        torch.set_num_threads(1)  # the model is so small that more threads only wait for each other
    console = Console()
    with Engine(model, tokenizer, **options) as engine:
        if args.demo and not args.json:
            from quire.passes.explain import Explanation

            runner = engine.runner
            print(f"{Explanation(type(model).__name__, runner.sites, runner.selection, None)}\n", flush=True)
        run = Texts(prompts or [DEMO[0]])
        if args.json:
            for event in engine.stream(run.prompts, params, raise_on_error=False):
                run.take(event)
        elif console.is_terminal:
            stream_live(engine, run, params, console, args.stream)
        else:
            stream_plain(engine, run, params, args.stream)
        if args.json:
            print(json.dumps({"outputs": [{name: getattr(o, name) for name in IN_JSON} for o in run.outputs if o is not None],
                              "stats": dataclasses.asdict(engine.stats())}))
        print(run.summary(engine), file=sys.stderr)
    failed = [o for o in run.outputs if o is not None and o.error]
    for output in failed:
        print(f"quire: prompt {output.index + 1}: {output.error}", file=sys.stderr)
    return 1 if failed else 0


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of --engine, --attention and --page-size. Raises ValueError for a wrong one, or two values of one option."""
    from quire.graph_runner.config import check_options

    options = dict(args.engine)
    for name in ("attention", "page_size"):
        value = getattr(args, name)
        if value is not None and options.setdefault(name, value) != value:
            raise ValueError(f"--{name.replace('_', '-')} {value} and --engine {name}={options[name]} differ; give one of them")
    return check_options(options)


def _no_loading_bar() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def explain(args: argparse.Namespace) -> int:
    """``quire explain``. Exit code 1 if the model is refused."""
    from quire.graph_runner.loading import model_of_command
    from quire.passes.explain import explain as explain_model

    if args.config is None and args.device is not None:
        raise ValueError("--device needs --config: a loaded model is explained for the device that it is loaded to (a GPU if "
                         "there is one). Give the model's config.json as --config, or omit --device")
    if args.config is not None:
        explanation = _explain_config(args)
    else:
        _no_loading_bar()
        model, _ = model_of_command(args.model)
        explanation = explain_model(model, attention=args.attention, page_size=args.page_size)
    print(json.dumps(explanation.as_dict()) if args.json else explanation.text(every=args.all))
    return 0 if explanation.supported else 1


def _explain_config(args: argparse.Namespace) -> Any:
    """Explain a model from its config alone: it is traced on the meta device."""
    import torch
    import transformers

    from quire.attn_ops.backend import UnsupportedAttention
    from quire.attn_ops.selection import select_latent_or_dense
    from quire.graph_runner.bench.models import ModelSpec, config_of
    from quire.graph_runner.bench.shapes import SHAPES
    from quire.graph_runner.loading import readable
    from quire.passes.capture.paged_model import find_sites
    from quire.passes.explain import Explanation
    from quire.passes.options import QuireOptions

    QuireOptions(page_size=args.page_size)  # checks it
    if args.config in SHAPES:
        config = config_of(ModelSpec(args.config, torch.bfloat16, torch.device("cpu")))
        dtype = torch.bfloat16
    else:
        if not Path(args.config).is_file():
            raise FileNotFoundError(f"no config file at {args.config}, and no shape of that name ({', '.join(SHAPES)})")
        config = readable(args.config, lambda: transformers.AutoConfig.from_pretrained(args.config))
        dtype = getattr(config, "dtype", None) or torch.get_default_dtype()
    where = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sites: list[Any] = []
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    try:
        sites = find_sites(model.eval())
        selection = select_latent_or_dense(args.attention, sites, device=where, page_size=args.page_size)
    except UnsupportedAttention as error:
        return Explanation(type(model).__name__, sites, None, str(error))
    return Explanation(type(model).__name__, sites, selection, None)


def backends(args: argparse.Namespace) -> int:
    """``quire backends``."""
    from quire.attn_ops.registry import backends as table

    print(table(args.device))
    return 0


def bench(args: argparse.Namespace) -> int:
    """``quire bench``."""
    from quire.graph_runner.bench.main import run

    _no_loading_bar()
    return run(args, args.argv[1:])


def _model_and_texts(args: argparse.Namespace, seed: int) -> tuple[Any, Any, list[list[int]]]:
    """Of ``quire calibrate`` and ``quire quality``: the model, its tokenizer, and the texts as token ids."""
    from quire.graph_runner.loading import model_of_command
    from quire.graph_runner.quality import token_texts

    _no_loading_bar()
    model, tokenizer = model_of_command(args.model, text=True)
    text = None if args.text is None else Path(args.text).read_text()
    return model, tokenizer, token_texts(model, tokenizer, text, args.length, seed)


def calibrate(args: argparse.Namespace) -> int:
    """``quire calibrate``."""
    from quire.graph_runner.quality import calibrate as measure

    found = measure(*_model_and_texts(args, seed=0), args.out)
    print(f"{args.out}: channels of {len(found['channels'])} layers by importance, measured on {found['tokens']} tokens")
    return 0


def quality(args: argparse.Namespace) -> int:
    """``quire quality``."""
    from quire.graph_runner.quality import compare

    texts = _model_and_texts(args, seed=100)  # not those that channels are measured on
    for found in compare(*texts, args.attention, args.prefill):
        print(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    from quire.graph_runner.bench.main import add_arguments, engine_option
    from quire.graph_runner.config import option_help

    parser = argparse.ArgumentParser(prog="quire", description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"quire {version('quire')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show the whole text of an error, and its traceback")
    common.add_argument("-v", "--verbose", action="count", default=0, help="log what quire does to stderr; -vv: more of it")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=[common],
                                   allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    attention: dict[str, Any] = {"default": "auto", "metavar": "NAME",
                                 "help": "attention backend (default: auto; see quire backends)"}
    model: dict[str, Any] = {"metavar": "PATH", "help": "folder of a saved model (default: the one in quire)"}
    page_size: dict[str, Any] = {"type": int, "default": 16, "metavar": "N", "help": "tokens per page (default: 16)"}

    sub = command("generate", generate, "continue prompts, all of them at once")
    sub.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to continue; - reads one from standard input")
    sub.add_argument("--demo", action="store_true",
                     help="show the attention sites, and continue a few built-in prompts for the shipped model")
    sub.add_argument("--model", **model)
    sub.add_argument("--attention", **{**attention, "default": None})  # None: not given, so that --engine counts
    sub.add_argument("--max-tokens", type=int, default=128, metavar="N", help="maximum new tokens per prompt (default: 128)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    sub.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (default: all)")
    sub.add_argument("--top-p", type=float, default=1.0, metavar="P",
                     help="sample from the likeliest tokens whose probabilities sum to P (default: all)")
    sub.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    sub.add_argument("--page-size", **{**page_size, "default": None})
    sub.add_argument("--engine", type=engine_option, action="append", default=[], metavar="KEY=VALUE",
                     help="an option of quire.Engine (see below), e.g. num_pages=512; may be repeated")
    sub.add_argument("--no-stream", dest="stream", action="store_false", help="print the texts when they are done")
    sub.add_argument("--json", action="store_true", help="print one JSON object with the outputs and the engine's statistics")
    sub.formatter_class, sub.epilog = argparse.RawDescriptionHelpFormatter, "engine options:\n" + option_help(indent=2)

    sub = command("explain", explain, "say how each attention site of a model would run, or why it is refused")
    source = sub.add_mutually_exclusive_group()
    source.add_argument("--model", **model)
    source.add_argument("--config", metavar="FILE.json",
                        help="only a config.json, or a name that quire bench --model takes: no weights needed")
    sub.add_argument("--attention", **attention)
    sub.add_argument("--page-size", **page_size)
    sub.add_argument("--device", choices=("cpu", "cuda"), help="with --config: where it would run (default: a GPU)")
    sub.add_argument("--all", action="store_true", help="one row per attention site, where equal ones share a row")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("backends", backends, "list the attention backends: usable here or why not, and what each can do")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")

    sub = command("calibrate", calibrate, "measure which channels of the keys matter, for approximate attention backends")
    sub.add_argument("--out", required=True, metavar="FILE", help="where to write the channels, as JSON")
    other = command("quality", quality, "run a text through attention backends, and compare each with the first")
    other.add_argument("--prefill", action="store_true",
                       help="prefill each part of the text whole (default: decode it token by token)")
    other.add_argument("--attention", action="append", required=True, metavar="NAME", help="a backend; give two or more")
    for both in (sub, other):
        both.add_argument("--model", **model)
        both.add_argument("--text", metavar="FILE", help="text to run (default: what the model itself writes)")
        both.add_argument("--length", type=int, default=1024, metavar="N", help="tokens of a part of the text (default: 1024)")

    add_arguments(command("bench", bench, "measure decoding, mixed traffic, prefill, start-up and the attention kernels"))
    return parser


#: Loggers of which errors are enough. transformers imports torchao where it is installed, which logs the extensions that it
#: cannot load; failed prompts are reported at the end.
_QUIET = ("torchao", "torch.utils._pytree", "quire.graph_runner.calls")


@contextlib.contextmanager
def _logging(verbose: int) -> Iterator[None]:
    """Log what quire does to stderr: 1: the main events, 2: more. Levels are as before afterwards."""
    logger, handler = logging.getLogger("quire"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    before = [(each, each.level) for each in (logger, *map(logging.getLogger, _QUIET))]
    for quiet, _ in before[1:]:
        quiet.setLevel(logging.ERROR)
    if verbose:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for each, level in before:
            each.setLevel(level)


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= ERROR_LINES:
        return text
    return "\n".join([*lines[: ERROR_LINES - 1], f"... and {len(lines) - ERROR_LINES + 1} more lines; --traceback shows all"])


def _reader_gone() -> bool:
    """Whether the reader of our output is gone (``quire generate ... | head``); further output is then discarded. False: the
    broken pipe is another one."""
    out = sys.stdout.fileno()
    if hasattr(select, "poll"):  # not on Windows
        poll = select.poll()
        poll.register(out, 0)
        if not poll.poll(0):
            return False
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, out)
    os.close(devnull)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. 2: an error, with one message on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(argv)
    args.argv = argv
    try:
        with _logging(args.verbose):
            code = int(args.run(args))
        sys.stdout.flush()  # to notice here that the reader is gone, not at exit
        return code
    except BrokenPipeError:
        if not _reader_gone():
            raise
        return 141  # as of a program ended by SIGPIPE
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:  # UnsupportedAttention is a ValueError
        if args.traceback:
            raise
        print(_shortened(f"quire {args.command}: error: {str(error).strip()}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

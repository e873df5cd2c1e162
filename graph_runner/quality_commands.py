"""``quire calibrate`` and ``quire quality`` on the command line (``quality.py``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _model_and_texts(args: argparse.Namespace, seed: int) -> tuple[Any, Any, list[list[int]]]:
    """The model, its tokenizer, and the texts as token ids."""
    from transformers.utils import logging

    from quire.graph_runner.loading import model_of_command
    from quire.graph_runner.quality import token_texts

    logging.disable_progress_bar()
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


def add_commands(command: Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]) -> None:
    """Add both to the parser. ``command``: (name, function, help) -> the command's parser."""
    sub = command("calibrate", calibrate, "measure which channels of the keys matter, for approximate attention backends")
    sub.add_argument("--out", required=True, metavar="FILE", help="where to write the channels, as JSON")
    other = command("quality", quality, "run a text through attention backends, and compare each with the first")
    other.add_argument("--prefill", action="store_true",
                       help="prefill each part of the text whole (default: decode it token by token)")
    other.add_argument("--attention", action="append", required=True, metavar="NAME", help="a backend; give two or more")
    for parser in (sub, other):
        parser.add_argument("--model", metavar="PATH", help="folder of a saved model (default: the one in quire)")
        parser.add_argument("--text", metavar="FILE", help="text to run (default: what the model itself writes)")
        parser.add_argument("--length", type=int, default=1024, metavar="N",
                            help="tokens of a part of the text (default: 1024)")

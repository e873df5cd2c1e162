"""Every class of transformers' registries of causal LMs and of image-text models: made small, served, and compared.

    make models                                          # writes docs/models.md; continues what was interrupted
    make models ARGS="--only LlamaForCausalLM --again"   # some classes, though their results are there

Each class is built with random weights from its own config (``shrink.py``), in a process of its own with a time limit. An
engine serves three sequences with chunked prefill beside decode: its logits are compared with those of transformers' forward of
each sequence alone, and so are its greedy tokens. Image-text models are given text only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import quire
from quire.attn_ops.backend import UnsupportedAttention
from tests.zoo.configs import random_weights
from tests.zoo.harness import TOLERANCE, Batch, error, reference, serve
from tests.zoo.shrink import shrunk

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "build" / "models.jsonl"
REGISTRIES = {"causal LM": (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
              "image-text": (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText)}
SECONDS = 300  # of one class; most take 5
NEW_TOKENS = 4
OPTIONS: Any = dict(page_size=4, num_pages=64, max_num_seqs=4, max_num_batched_tokens=12, max_model_len=48)
INTRO = f"""Written by `make models` (tests/zoo/all_models.py): every class of transformers' registries, shrunk from its own
config, served by an engine with chunked prefill in mixed batches, and compared with transformers' forward of each sequence
alone (float32, {TOLERANCE:g} of the largest logit). Exact: the same logits and greedy tokens. Refused: by quire, for the reason
given. Not run: transformers cannot build the shrunk class in this environment. Image-text models are given text."""


@dataclass(frozen=True)
class Result:
    """What became of one class.

    Attributes:
        outcome: "exact"; "refused" by quire; "wrong"; "error" of any other kind; "not run": transformers cannot build it here
            or run it alone.
        reason: one line, "" if exact.
    """

    registry: str
    config: str
    model: str
    outcome: str
    reason: str = ""


def entries() -> Iterator[tuple[str, type, str]]:
    """(registry, config class, name of the model class) of every class. GPT2Config is registered under two names."""
    for registry, (classes, _) in REGISTRIES.items():
        for config, model in {config.__name__: (config, model) for config, model in classes.items()}.values():
            yield registry, config, (model[0] if isinstance(model, (tuple, list)) else model).__name__


def check(registry: str, config: type) -> tuple[str, str]:
    """Build, serve and compare one class: the outcome and its reason."""
    torch.set_num_threads(1)
    alone: Exception | None = None
    try:
        model = made(registry, config)
    except Exception as failed:
        return "not run", line(failed)
    try:
        plain, batch = build(registry, config)
        model.load_state_dict(plain.state_dict())
    except Exception as failed:
        alone = failed
    try:
        with quire.Engine(model, **OPTIONS) as engine:
            if alone is not None:
                return "not run", line(alone)
            difference = error(serve(engine.runner.paged, batch, page_size=4, attention="torch_native", pad=(3, 2)), batch)
            outs = engine.generate([i.tolist() for i in batch.ids], quire.SamplingParams(
                max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
    except UnsupportedAttention as why:
        return "refused", line(why, named=False)
    except Exception as failed:
        return "error", line(failed)
    if not difference <= TOLERANCE:
        return "wrong", f"logits differ by {difference:.2g} of the largest"
    for prompt, out in zip(batch.ids, outs, strict=True):
        ids = torch.cat([prompt, torch.tensor(out.token_ids[:-1])])
        with torch.no_grad():
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, -NEW_TOKENS:]
        if out.error is not None or logits.argmax(-1).tolist() != out.token_ids:
            return "wrong", f"greedy tokens differ {out.error or ''}"
    return "exact", ""


def made(registry: str, config: type, **options: Any) -> torch.nn.Module:
    """Built as the registry's class itself: its auto class does not take every config that is registered."""
    torch.manual_seed(0)
    kind = REGISTRIES[registry][0][config]
    kind, small = kind[0] if isinstance(kind, (tuple, list)) else kind, shrunk(config)
    try:
        return kind._from_config(small, **options).eval()
    except AttributeError:  # the class is that of a part of the model, as MusicGen's decoder
        return kind._from_config(small.get_text_config(decoder=True), **options).eval()


def build(registry: str, config: type) -> tuple[torch.nn.Module, Batch]:
    """The model with random weights and eager attention, and what it computes of each sequence alone. Raises if it cannot."""
    model = made(registry, config, attn_implementation="eager")
    for std in (0.2, 0.1, 0.05, 0.4, 0.02):  # logits of order 1 to 10, which depend on the tokens before
        random_weights(model, std)
        batch = reference(model)
        with torch.no_grad():
            other = model(input_ids=torch.cat([batch.ids[0][1:2], batch.ids[0][1:]])[None], use_cache=False).logits[0]
        change = (other - batch.logits[0])[-1].abs().max().item()
        if 0.1 < batch.scale < 1000 and (change > 1e-3 * batch.scale or batch.ids[0][0] == batch.ids[0][1]):
            return model, batch
    raise ValueError(f"random weights give logits of up to {batch.scale:.2g}, in which a token changes {change:.2g}")


def line(error: BaseException, named: bool = True) -> str:
    """An error in one line of a table."""
    text = re.sub(r"\s+", " ", str(error)).replace("|", "\\|").strip()
    text = re.sub(r"`|/[\w./-]*/site-packages/", "", text)
    return (f"{type(error).__name__}: " if named else "") + (text if len(text) <= 240 else text[:237] + "...")


def in_a_process(registry: str, config: type, seconds: float = SECONDS) -> tuple[str, str]:
    """``check`` in a fork of this process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(check(registry, config)), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else ("error", f"not done after {seconds:g} s")
    except EOFError:
        process.join()
        return "error", f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


# -- the page ---------------------------------------------------------------------------------------------------------------


def stored() -> dict[tuple[str, str], Result]:
    """Finished results, of earlier calls too."""
    rows = [Result(**json.loads(text)) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {(row.registry, row.config): row for row in rows}


def page(results: list[Result], versions: str) -> str:
    """The Markdown of docs/models.md."""
    out = ["# transformers' models", "", INTRO, "", versions]
    for registry in dict.fromkeys(r.registry for r in results):
        rows = [r for r in results if r.registry == registry]
        counts = Counter(r.outcome for r in rows)
        out += ["", f"## {len(rows)} {registry} classes: " + ", ".join(f"{counts[o]} {o}" for o in (
            "exact", "refused", "wrong", "error", "not run")), "", "| class | config | result | reason |", "|---|---|---|---|"]
        out += [f"| {r.model} | {r.config} | {r.outcome} | {r.reason} |" for r in rows]
    return "\n".join(out) + "\n"


def read(text: str) -> list[Result]:
    """The results on a page that ``page`` wrote."""
    found, registry = [], ""
    for row in text.splitlines():
        if head := re.match(r"## \d+ (.*) classes:", row):
            registry = head[1]
        elif registry and row.startswith("| ") and not row.startswith("| class "):
            model, config, outcome, reason = (c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1])
            found.append(Result(registry, config, model, outcome, reason))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of model or config classes")
    parser.add_argument("--again", action="store_true", help="run classes again whose results are there")
    parser.add_argument("--outcome", nargs="+", help="with --again: only those with this outcome so far")
    args = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    known = stored()
    for registry, config, model in entries():
        before = known.get((registry, config.__name__))
        chosen = not args.only or {config.__name__, model} & set(args.only)
        if not chosen or (before and not (args.again and (not args.outcome or before.outcome in args.outcome))):
            continue
        start = time.monotonic()
        found = Result(registry, config.__name__, model, *in_a_process(registry, config))
        known[registry, config.__name__] = found
        print(f"{time.monotonic() - start:5.1f} s  {model}: {found.outcome} {found.reason}", flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
    rows = [known[key] for r, c, _ in entries() if (key := (r, c.__name__)) in known]
    PAGE.write_text(page(rows, f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}."))


if __name__ == "__main__":
    main()

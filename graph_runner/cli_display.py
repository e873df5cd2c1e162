"""What ``quire generate`` shows: growing panels on a terminal, plain text in a pipe, and a summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

REFRESH = 1 / 12  # seconds between two redraws


@dataclass
class Texts:
    """Texts and times of one ``quire generate``."""

    prompts: list[str]
    texts: list[str] = field(init=False)
    outputs: list[Any] = field(init=False)
    first_tokens: dict[int, float] = field(default_factory=dict)  # time by prompt
    decoded: int = 0  # tokens after every prompt had its first
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.texts, self.outputs = [""] * len(self.prompts), [None] * len(self.prompts)

    def take(self, event: Any) -> None:
        now = time.perf_counter()
        if event.token_ids:
            if event.index in self.first_tokens and len(self.first_tokens) == len(self.prompts):
                self.decoded += len(event.token_ids)
            self.first_tokens.setdefault(event.index, now)
        self.texts[event.index] = event.output.text
        if event.finished:
            self.outputs[event.index] = event.output
            self.ended = now

    def summary(self, engine: Any) -> str:
        """Tokens per second. Prefill: all prompts until each has its first token; decode: after that."""
        done = [o for o in self.outputs if o is not None]
        given, made = sum(len(o.prompt_token_ids) for o in done), sum(len(o.token_ids) for o in done)
        speeds = []
        if self.first_tokens:
            prefilled = max(self.first_tokens.values())
            speeds.append(f"prefill {given / max(prefilled - self.began, 1e-9):,.0f} tokens/s")
            if self.decoded:
                speeds.append(f"decode {self.decoded / max(self.ended - prefilled, 1e-9):,.0f} tokens/s")
        runner = engine.runner
        graphs = f"CUDA graphs: {runner.graphs.stats}" if runner.device.type == "cuda" else "CUDA graphs: none on a CPU"
        requests = f"{len(done)} request{'s' * (len(done) != 1)}, {given} prompt and {made} new tokens"
        where = f"attention {runner.backend.name} on {runner.device}, page size {runner.cache.page_size}"
        return "; ".join((requests, *speeds, where, graphs))


def _panels(run: Texts, width: int) -> Any:
    """The prompts with their continuations so far, in two columns on a wide terminal."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    columns = 2 if width >= 110 and len(run.prompts) > 1 else 1
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    cells = []
    for prompt, text, output in zip(run.prompts, run.texts, run.outputs, strict=True):
        content = Text.assemble((prompt, "bold"), text)
        if output is not None and output.error:
            content = Text.assemble((prompt, "bold"), ("\n" + output.error, "red"))
        border = "blue" if output is None else "red" if output.error else "green"
        cells.append(Panel(content, border_style=border, title_align="left",
                           title=None if output is None else Text(str(output.finish_reason), "dim")))
    for i in range(0, len(cells), columns):
        grid.add_row(*cells[i : i + columns])
    return grid


def stream_live(engine: Any, run: Texts, params: Any, console: Any, stream: bool) -> None:
    """On a terminal: one growing panel per prompt; at the end all of them in full."""
    from rich.live import Live

    with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop") as live:
        drawn = 0.0
        for event in engine.stream(run.prompts, params, raise_on_error=False):
            run.take(event)
            if stream and time.perf_counter() - drawn > REFRESH:
                live.update(_panels(run, console.width), refresh=True)
                drawn = time.perf_counter()
    console.print(_panels(run, console.width))


def stream_plain(engine: Any, run: Texts, params: Any, stream: bool) -> None:
    """In a log or a pipe: a single prompt as its tokens come; several one after the other, at the end."""
    single, printed = len(run.prompts) == 1, 0
    if single:
        print(run.prompts[0], end="", flush=stream)
    for event in engine.stream(run.prompts, params, raise_on_error=False):
        run.take(event)
        if single and stream:
            print(event.output.text[printed:], end="", flush=True)
            printed = len(event.output.text)
    if single:
        print(run.texts[0][printed:], flush=True)
    else:
        for i, (prompt, text) in enumerate(zip(run.prompts, run.texts, strict=True)):
            print(f"[{i + 1}] {prompt}{text}\n")

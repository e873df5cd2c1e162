"""An engine in ordinary life, for as long as you like: threads that add, stream, abort, close, and change the model meanwhile.

    make soak                        # 10 minutes on a CPU
    make soak ARGS="--minutes 60 --seed 7"

Requests of known prompts run while another thread updates the weights in place, replaces parameters, toggles training mode and
gradient checkpointing (at any time, also while the model is traced), and a third one closes the engine and makes another. A
request that began and ended under one and the same set of weights must give the tokens of its run alone. At the end every page
is free, and the model is as it was. A thread that does not come forward for ``STUCK`` seconds fails the run with the stacks of
all threads.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quire.graph_runner.engine import Engine
from tests.tiny import GREEDY, PROMPTS, SAMPLED, assert_idle, load_model, load_tokenizer

STUCK = 120.0  # seconds; a step takes milliseconds, and tracing again a second or two
LONGER = 100.0  # seconds that a busy machine may take more
OPTIONS: Any = dict(page_size=4, num_pages=28, max_num_seqs=5, prefill_chunk_size=5, max_model_len=72)  # pages for about two
CHECKPOINTING = {"use_reentrant": False}


class Soak:
    """One run. ``seed``: of what the threads choose to do."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.counts, self.errors = seed, Counter[str](), list[str]()
        tokenizer = load_tokenizer()
        self.prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        self.params = [replace(GREEDY, max_tokens=12, ignore_eos=True), replace(SAMPLED, max_tokens=12, ignore_eos=True)]
        self.model = load_model(num_layers=2)
        self.weights = [copy.deepcopy(self.model.state_dict())]
        for _ in range(2):
            other = load_model(num_layers=2)
            for parameter in other.parameters():  # once each: some are tied
                parameter.data += 0.02 * torch.randn_like(parameter)
            self.weights.append(other.state_dict())
        self.alone = [self._alone(w) for w in self.weights]
        #: Even: which weights the model has is in ``current``. Odd: they are being changed.
        self.version, self.current = 0, 0
        self.stop, self._making = threading.Event(), threading.Lock()
        self.engine = Engine(self.model, **OPTIONS)

    def _alone(self, weights: dict[str, torch.Tensor]) -> list[list[list[int]]]:
        """Tokens of each prompt and kind of request, one by one in an engine of their own."""
        model = load_model(num_layers=2)
        model.load_state_dict(weights)
        with Engine(model, **OPTIONS) as engine:
            return [[engine.generate([p], params)[0].token_ids for params in self.params] for p in self.prompts]

    # -- what the threads do --------------------------------------------------------------------------------------------------

    def request(self, choose: random.Random) -> None:
        """Some requests together, read to the end, or dropped on the way."""
        picks = [(choose.randrange(len(self.prompts)), choose.randrange(2)) for _ in range(choose.randint(1, 4))]
        events_to_read = choose.randint(1, 20) if choose.random() < 0.3 else None
        engine, before, current = self.engine, self.version, self.current
        outputs: dict[int, Any] = {}
        try:
            stream = engine.stream([self.prompts[p] for p, _ in picks], [self.params[k] for _, k in picks],
                                   raise_on_error=False)
            for n, event in enumerate(stream):
                if event.finished:
                    outputs[event.index] = event.output
                if n == events_to_read:
                    stream.close()  # type: ignore[attr-defined]
                    self.counts["dropped streams"] += 1
                    break
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
        after = self.version
        for index, output in outputs.items():
            if output.finish_reason == "abort":
                with self._making:  # it is closed before it is replaced
                    assert engine is not self.engine or events_to_read is not None, "aborted by nobody"
                self.counts["aborted"] += 1
                continue
            assert output.error is None and len(output.token_ids) == 12, output
            self.counts["finished"] += 1
            if before == after and before % 2 == 0:
                prompt, kind = picks[index]
                assert output.token_ids == self.alone[current][prompt][kind], (
                    f"request {picks[index]} under weights {current}: {output.token_ids} together, "
                    f"{self.alone[current][prompt][kind]} alone")
                self.counts["compared with their run alone"] += 1

    def add_and_abort(self, choose: random.Random) -> None:
        """By ``add_request``, with nobody to read; aborted by id, or left to other threads' steps."""
        engine = self.engine
        try:
            ids = engine.add_request(self.prompts[choose.randrange(len(self.prompts))], replace(self.params[0], n=1))
            for _ in range(choose.randint(0, 3)):
                engine.step()
            if choose.random() < 0.7:
                for request_id in ids:
                    engine.abort(request_id)
            else:
                while ids[0] in engine.requests and engine is self.engine:
                    engine.step()
            self.counts["added by hand"] += 1
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
        time.sleep(choose.random() * 0.05)

    def change(self, choose: random.Random) -> None:
        """The model, under the running engine."""
        what = choose.choice(("weights", "weights", "parameters", "train", "checkpointing", "plain forward"))
        if what in ("train", "checkpointing"):  # at any time, also while it is traced
            self._change(what, choose)
        else:
            with self._making, self.engine.lock.hold():  # between steps: a model that is being traced is nobody else's
                self._change(what, choose)
        self.counts[f"changes: {what}"] += 1
        time.sleep(choose.random() * 0.6)

    def _change(self, what: str, choose: random.Random) -> None:
        model = self.model
        if what in ("weights", "parameters"):
            self.version += 1
            self.current = choose.randrange(len(self.weights))
            if what == "weights":
                model.load_state_dict(self.weights[self.current])
            else:
                for name, parameter in model.named_parameters():
                    parameter.data = self.weights[self.current][name].clone()
            self.version += 1
        elif what == "train":
            model.train(not model.training)
        elif what == "checkpointing":
            if model.is_gradient_checkpointing:
                model.gradient_checkpointing_disable()
            else:
                model.gradient_checkpointing_enable(CHECKPOINTING)
        else:
            model(input_ids=torch.tensor([self.prompts[0]]), use_cache=False).logits.sum().backward()
            model.zero_grad(set_to_none=True)

    def reopen(self, choose: random.Random) -> None:
        """Close the engine under everybody, and make another."""
        if self.stop.wait(choose.uniform(1, 8)):
            return
        with self._making:
            self.engine.close()
            self.engine.step()  # takes the last events of requests added by hand
            assert_idle(self.engine)
            self.engine = Engine(self.model, **OPTIONS)
        self.counts["engines"] += 1

    # -- the run --------------------------------------------------------------------------------------------------------------

    def run(self, seconds: float, enough: Callable[[Counter[str]], Any] = lambda counts: True) -> Counter[str]:
        """Raises AssertionError with what went wrong first. Goes on until there is ``enough``, for at most LONGER."""
        alive: dict[str, float] = {}

        def loop(name: str, act: Callable[[random.Random], None]) -> None:
            choose = random.Random(f"{self.seed} {name}")
            try:
                while not self.stop.is_set():
                    alive[name] = time.monotonic()
                    act(choose)
            except BaseException as error:
                self.errors.append(f"{name}: {type(error).__name__}: {error}")
                logging.exception(name)
                self.stop.set()

        acts = {"requests 1": self.request, "requests 2": self.request, "requests 3": self.request,
                "by hand": self.add_and_abort, "changes": self.change, "reopening": self.reopen}
        threads = [threading.Thread(target=loop, args=item, daemon=True) for item in acts.items()]
        end = time.monotonic() + seconds
        for thread in threads:
            thread.start()
        while not self.stop.wait(0.2) and (now := time.monotonic()) < (end if enough(self.counts) else end + LONGER):
            stuck = [name for name, at in list(alive.items()) if now - at > STUCK]
            if stuck:
                faulthandler.dump_traceback()
                self.errors.append(f"{stuck} did not come forward for {STUCK} s")
                break
        self.stop.set()
        for thread in threads:
            thread.join(STUCK)
            if thread.is_alive():
                faulthandler.dump_traceback()
                self.errors.append(f"{thread.name} did not end within {STUCK} s")
                break
        assert not self.errors, self.errors
        while self.engine.has_unfinished:
            self.engine.step()
        assert_idle(self.engine)
        self.model.eval()
        again = self.engine.generate([self.prompts[1]], self.params[0])[0].token_ids
        assert again == self.alone[self.current][1][0], "after the storm, the engine serves other weights than the model has"
        self.engine.close()
        state = self.model.state_dict()
        assert all(torch.equal(state[k], t) for k, t in self.weights[self.current].items())
        return self.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("quire").setLevel(logging.ERROR)  # "tracing it again" is ordinary here
    torch.set_num_threads(1)
    counts = Soak(args.seed).run(60 * args.minutes)
    print(f"soaked for {args.minutes:g} minutes: "
          + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))


if __name__ == "__main__":
    main()

"""The block table on the device, as the model sees it in every step of an engine: the pages of the requests in the batch,
through preemption, slots that change hands, aborts, and steps that fail at any point."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire import Engine, SamplingParams
from quire.attn_ops.kv_cache import pages_for
from tests.tiny import assert_idle, hf_greedy, small_llama

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama(eos_token_id=None)


class Broken(Exception):
    pass


class Watched:
    """Compares the table in every forward, and lets ``breaks`` steps fail, at a point that ``rng`` picks."""

    def __init__(self, engine: Engine, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.rng, self.forwards, self.broken = engine, rng, 0, 0
        self.breaks = 0.0
        runner = engine.runner
        for owner, name in ((runner.buffers, "fill"), (runner.buffers, "upload"), (runner, "stage"), (runner, "forward")):
            monkeypatch.setattr(owner, name, self.fragile(getattr(owner, name)))
        forward = runner.forward

        def watched(staged: Any) -> Any:
            result = forward(staged)
            table, rows = staged.step.metadata.block_table_tensor, staged.batch.rows
            for i, row in enumerate(rows):
                used = pages_for(row.start + row.num_new, runner.config.page_size)
                assert table[i, :used].tolist() == row.request.pages[:used], (i, row)
            assert not table[len(rows) :].any()
            self.forwards += 1
            return result

        monkeypatch.setattr(runner, "forward", watched)

    def fragile(self, function: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            before = self.rng.random() < 0.5
            fails = self.rng.random() < self.breaks
            error = self.rng.choice((Broken, Broken, Broken, torch.OutOfMemoryError))
            if fails and before:
                self.broken += 1
                raise error
            result = function(*args)
            if fails:
                self.broken += 1
                raise error
            return result

        return wrapper


SCHEDULES = {
    "sync": dict(num_pages=40, cudagraph_capture_sizes=[2, 6]),
    "async": dict(num_pages=40, async_stepping=True, cudagraph_capture_sizes=[1, 4]),
    "preempted": dict(num_pages=17, async_stepping=True, prefill_chunk_size=5, cudagraph_capture_sizes=[6]),
    "mixed_graphs": dict(num_pages=24, async_stepping=True, cudagraph_capture_sizes=[4], cudagraph_token_sizes=[16, 64]),
    "eager": dict(num_pages=24, async_stepping=True, cudagraph_capture_sizes=[], max_num_batched_tokens=11),
}


@pytest.mark.parametrize(("schedule", "breaks"), [
    pytest.param(name, breaks, marks=[pytest.mark.slow] * (not breaks or name != "async"))
    for name in SCHEDULES for breaks in (0.0, 0.02)])
def test_the_model_sees_the_pages_of_its_requests(schedule, breaks, model, monkeypatch) -> None:
    rng = random.Random(schedule)
    options = dict(page_size=4, max_num_seqs=6, max_model_len=60) | SCHEDULES[schedule]
    count = 40 if breaks else 60
    with Engine(model, **options) as engine:
        watched = Watched(engine, rng, monkeypatch)
        watched.breaks = breaks
        prompts: dict[int, list[int]] = {}
        outputs: dict[int, Any] = {}
        while len(prompts) < count or engine.has_unfinished:
            if len(prompts) < count and rng.random() < 0.4:
                prompt = [rng.randrange(64) for _ in range(rng.randint(1, 25))]
                params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 30))
                prompts[engine.add_request(prompt, params)[0]] = prompt
            if rng.random() < 0.04 and engine.requests:
                engine.abort(rng.choice(list(engine.requests)))
            try:
                for event in engine.step():
                    if event.finished:
                        outputs[event.index] = event.output
            except Broken:
                pass
        assert_idle(engine)
        assert len(outputs) == count and watched.forwards > 100
        assert (watched.broken > 5) == (breaks > 0)
        if schedule == "preempted":
            assert engine.scheduler.num_preemptions > 5
        finished = [i for i, output in outputs.items() if output.finish_reason == "length"]
        assert len(finished) > (5 if breaks else 20)
        for i in finished:
            assert outputs[i].token_ids == hf_greedy(model, prompts[i], len(outputs[i].token_ids))


def noted(function: Any, name: str, order: list[str]) -> Any:
    def wrapper(*args: Any) -> Any:
        order.append(name)
        return function(*args)

    return wrapper


def test_a_backend_that_plans_finds_the_table_up_to_date(model, monkeypatch) -> None:
    """Its plan may read the table on the device before the graph runs, so the update comes before the plan, and once."""
    with Engine(model, num_pages=40, page_size=4, max_num_seqs=4, cudagraph_capture_sizes=[4]) as engine:
        runner, order = engine.runner, []
        monkeypatch.setattr(runner, "plans", True)
        monkeypatch.setattr(runner, "plans_graphs", True)
        for owner, name in ((runner.buffers, "update_table"), (runner, "forward")):
            monkeypatch.setattr(owner, name, noted(getattr(owner, name), name, order))
        output = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8))[0]
        assert output.token_ids == hf_greedy(model, [5, 6, 7], 8)
        assert order == ["update_table", "forward"] * 8

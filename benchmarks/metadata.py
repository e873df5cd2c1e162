"""Host time of a step's metadata, on one core: what the engine packs for a step, and the functions of ``attn_ops/metadata``.

    python benchmarks/metadata.py --json cpu_metadata.json     # exits with 1 if a step's metadata take longer than the limits

decode: 256 sequences of 2048 tokens, one token each. mixed: 8192 tokens, 128 decodes and 4 chunks of prefills. Times are the
thread's own processor time, so that other work on the machine counts only by what it drops from caches; median and least.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from quire.attn_ops import metadata
from quire.graph_runner.bench.record import processor_ms, script, started
from quire.graph_runner.forward_batch import ForwardBatch
from quire.graph_runner.request import Request, RequestOutput, ScheduledBatch, ScheduledRow
from quire.graph_runner.sampling_params import SamplingParams
from quire.graph_runner.step_buffers import BatchShape, StepBuffers

PAGE, LENGTH = 16, 2048
LIMITS = {"decode": 0.5, "mixed": 2.0}  # ms
CASES = {"decode": [1] * 256, "mixed": [1] * 128 + [2016] * 4}


def engine_step(query_lens: Sequence[int]) -> Callable[[], object]:
    """Pack a batch and make its ForwardBatch, as ``ModelRunner.stage`` does. The device has the pages of the tokens before the
    step, and gets those that the step adds each time."""
    rows = len(query_lens)
    shape, width = BatchShape(sum(query_lens), rows), LENGTH // PAGE
    buffers = StepBuffers(shape, max_pages_per_seq=width, max_num_seqs=rows, page_size=PAGE, device=torch.device("cpu"))
    before, scheduled = [], []
    for i, count in enumerate(query_lens):
        ids = list(range(LENGTH))
        request = Request(i, ids, SamplingParams(temperature=0), RequestOutput(i, None, ids), seed=0,
                          stop_token_ids=frozenset(), max_total_tokens=LENGTH, slot=i,
                          pages=list(range(1 + i * width, 1 + i * width + (LENGTH - count) // PAGE)))
        before.append(ScheduledRow(request, LENGTH - count - 1, 1, False))
        scheduled.append(ScheduledRow(request, LENGTH - count, count, True))
    buffers.fill(ScheduledBatch(before, rows, rows), BatchShape(rows, rows))
    buffers.commit()
    for i, row in enumerate(scheduled):
        pages = row.request.pages
        pages.extend(range(1 + i * width + len(pages), 1 + (i + 1) * width))
    batch = ScheduledBatch(scheduled, shape.num_tokens, sum(n == 1 for n in query_lens))

    def run() -> ForwardBatch:
        return buffers.forward_batch(shape, buffers.fill(batch, shape), batch)

    return run


def main() -> int:
    parser = script(__doc__, None, limited=False)
    parser.set_defaults(device="cpu")
    torch.set_num_threads(1)
    record, slow = started(parser.parse_args()), 0
    for name, query_lens in CASES.items():
        table = np.arange(1, 1 + len(query_lens) * (LENGTH // PAGE), dtype=np.int32).reshape(len(query_lens), -1)
        seqs, build = [LENGTH] * len(query_lens), metadata.CommonAttentionMetadata.build
        meta = build(query_lens, seqs, table, page_size=PAGE)
        half = metadata.create_ubatch_slices(meta.query_start_loc_cpu, 2)
        functions: dict[str, Callable[[], object]] = {
            "the engine's step": engine_step(query_lens),
            "CommonAttentionMetadata.build": partial(build, query_lens, seqs, table, page_size=PAGE),
            "split_decodes_and_prefills": partial(metadata.split_decodes_and_prefills, meta),
            "split_attn_metadata, 2 parts": partial(metadata.split_attn_metadata, half, meta),
            "make_local_attention_virtual_batches": partial(metadata.make_local_attention_virtual_batches, 512, meta),
        }
        for what, function in functions.items():
            times = processor_ms(function)
            median = statistics.median(times)
            slow += median > LIMITS[name]
            record.keep({"case": name, "what": what, "median_ms": median, "least_ms": min(times), "limit_ms": LIMITS[name]})
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())

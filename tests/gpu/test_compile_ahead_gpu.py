"""On a GPU: what an engine's start compiles ahead is all that its start launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, logging, os
import torch
from quire.graph_runner.engine import Engine
from quire.passes.compile.ahead import CompileAhead
from tests.tiny import GREEDY, load_model

logging.basicConfig(level=logging.INFO)
found = {}

def kernels():
    names = [f for _, _, files in os.walk(os.environ["TRITON_CACHE_DIR"]) for f in files if f.endswith("_kernel.cubin")]
    return {name: names.count(name) for name in sorted(set(names))}

wait = CompileAhead.wait
def waited(self):
    wait(self)
    found["ahead"] = kernels()
CompileAhead.wait = waited

with Engine(load_model("cuda", torch.bfloat16), num_pages=400, max_num_seqs=24, attention="triton") as engine:
    found["start"] = kernels()
    assert engine.generate([[5, 6, 7]] * 3, GREEDY)[0].token_ids
    found["run"] = kernels()
print(json.dumps(found))
"""


@pytest.mark.alone  # beside other tests the workers' time may run out, and the rest is compiled by the start
def test_nothing_is_compiled_that_was_not_foreseen(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "QUIRE_COMPILE_WORKERS": "4", "QUIRE_TUNE": "0",
           "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
           "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    for kept in (False, True):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, cwd=ROOT, check=False,
                              timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["ahead"].keys() >= {"decode_kernel.cubin", "extend_kernel.cubin", "sample_kernel.cubin"}
        assert found["ahead"] == found["start"] == found["run"]
        assert ("compiled ahead by" in done.stderr) == (not kept)  # the second start finds all of it

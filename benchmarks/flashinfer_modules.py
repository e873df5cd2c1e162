"""Compile FlashInfer's kernels that the conformance kit needs into a folder that stands for the package flashinfer-jit-cache.

    python benchmarks/flashinfer_modules.py prebuilt            # nvcc, but no GPU; hours of one core, in $MAX_JOBS compilers
    PYTHONPATH=prebuilt python -m quire.attn_ops.conformance --backend flashinfer

FlashInfer compiles a module at its first use, one after another: on a machine without them, checks of many shapes take longer
than a check may. A second call goes on where the first one was cut.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.backends.flashinfer.modules import Module

DIMS = (64, 128, 256)  # those that the backend declares
DTYPE = "bfloat16"  # in which the GPU tests check it
PACKAGE = '''"""FlashInfer's modules, compiled by quire's benchmarks/flashinfer_modules.py."""

from pathlib import Path

__version__ = "{}"


def get_jit_cache_dir() -> str:
    return str(Path(__file__).parent / "modules")
'''


def specs() -> list[Any]:
    """FlashInfer's descriptions of the modules for each head dim, with and without a window and a softcap: two for prompts, of
    which decode steps of large groups take one, and one for other decode steps."""
    from flashinfer.jit import gen_batch_decode_module

    found, dtype = [], getattr(torch, DTYPE)
    for dim, windowed, capped in itertools.product(DIMS, (False, True), (False, True)):
        found += [Module(kernels, DTYPE, dim, windowed, capped).spec() for kernels in ("fa3", "fa2")]
        found.append(gen_batch_decode_module(dtype, dtype, dtype, torch.int32, dim, dim, 0, windowed, capped))
    return found


def write(folder: Path, version: str) -> None:
    """Compile what ``folder`` lacks, and print the seconds of each."""
    package = folder / "flashinfer_jit_cache"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(PACKAGE.format(version))
    for spec in specs():
        file, began = package / "modules" / spec.name / f"{spec.name}.so", time.monotonic()
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            spec.build(need_lock=True)
            shutil.copyfile(spec.get_library_path(), part := file.with_suffix(".part"))
            part.replace(file)
            print(f"{time.monotonic() - began:.0f} s {spec.name}", flush=True)


def main() -> None:
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # a GPU names its own
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    from flashinfer import __version__

    write(folder, __version__)


if __name__ == "__main__":
    main()

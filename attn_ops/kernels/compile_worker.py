"""Compile recorded launches (``attn_ops/kernels/launch.py``) into Triton's cache on disk, without a GPU.

``python -m quire.attn_ops.kernels.compile_worker`` reads a pickle from its standard input: (target, launches), the target as
Triton describes it: backend, arch, warp size. A kernel that cannot be compiled is left to the process that launches it, which
reports why.
"""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from quire.attn_ops.kernels.launch import DescriptorArgument, Launch, TensorArgument, fix_cache_key


def use_target(target: Sequence[Any]) -> None:
    """Make Triton compile for this target instead of a GPU that it finds."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = GPUTarget(*target)
    stand_in: Any = SimpleNamespace(get_current_target=lambda: found, get_current_device=lambda: 0,
                                    get_current_stream=lambda device: 0)
    driver.set_active(stand_in)


def compile_launch(launch: Launch) -> Any:
    """The compiled kernel of a recorded launch."""
    kernel = getattr(importlib.import_module(launch.module), launch.name)
    fix_cache_key(kernel)
    arguments = [_descriptor(a) if isinstance(a, DescriptorArgument) else a for a in launch.arguments]
    return kernel.warmup(*arguments, grid=(1,), **dict(launch.options))


def _descriptor(argument: DescriptorArgument) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape = list(argument.block_shape)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return TensorDescriptor(TensorArgument(argument.dtype, True), shape, strides, shape)


def triton_version() -> str:
    import triton

    return triton.__version__


def main() -> None:
    target, launches = pickle.load(sys.stdin.buffer)
    use_target(target)
    failed = 0
    for launch in launches:
        try:
            compile_launch(launch)
        except Exception as error:
            failed += 1
            print(f"{launch.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

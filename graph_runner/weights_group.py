"""A process group of its own that carries weights from a trainer (rank 0) to engines.

Apart from torch.distributed's default group, which the trainer or the user may have for other things. In the trainer::

    group = WeightsGroup("10.0.0.1", 29500, rank=0, world_size=2, device="cuda")
    for name, p in model.named_parameters():                    # in the order that the engine was given
        group.send(p.detach(), name)

and in the engine's process ``engine.init_weights_update_group("10.0.0.1", 29500, rank=1, world_size=2)``, then
``engine.update_weights_from_distributed(names, dtypes, shapes)``.

Before each tensor its dtype, shape and name are sent, and all ranks say whether they expect it: without that a smaller tensor
would fill a part of the other's memory, and a larger one end the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quire.attn_ops.kernels.launch import synchronize

_HEADER = 1024  # bytes
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


class WeightsGroup:
    """One rank of the group; rank 0 listens at ``master_address``. ``backend``: "nccl" or "gloo"; by default nccl for CUDA
    tensors. ``timeout``: seconds to wait for the others. Raises ValueError for a rank outside the group, or an unknown backend,
    RuntimeError if the others did not come in time."""

    def __init__(self, master_address: str, master_port: int, rank: int, world_size: int, *, group_name: str = "quire",
                 backend: str | None = None, device: torch.device | str = "cpu", timeout: float = 300.0) -> None:
        self.device = torch.device(device)
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a group of {world_size}: ranks are 0 to {world_size - 1}")
        self._wait = wait = timedelta(seconds=timeout)
        try:
            store = dist.PrefixStore(group_name, dist.TCPStore(master_address, master_port, world_size, rank == 0, wait))
            self._group: Any = _process_group(backend, store, rank, world_size, wait)
        except dist.DistError as error:
            raise RuntimeError(f"the group for weight updates at {master_address}:{master_port} did not form within "
                               f"{timeout:g} s: {error}. Are all {world_size} ranks started, with one world_size?") from error

    def send(self, tensor: torch.Tensor, name: str = "") -> None:
        """From rank 0: give a tensor to the others. Returns when they have it. Without the ``name`` of its parameter,
        parameters of one shape that are sent in another order than announced would change places unnoticed. Raises ValueError
        if one of them expects another name, dtype or shape (nothing was given, and the group may go on), RuntimeError if one
        fails or takes too long."""
        tensor = tensor.detach().to(self.device).contiguous()
        about = _described(tensor.dtype, tensor.shape, name)
        if len(about.encode()) > _HEADER:
            raise ValueError(f"the name of a parameter has more than {_HEADER} bytes: {name[:60]!r}...")
        self._broadcast(torch.tensor(list(about.encode().ljust(_HEADER)), dtype=torch.uint8, device=self.device))
        if self._refusals(False):
            raise ValueError(f"a rank expects another tensor than {about}: send the parameters in the order, dtypes and shapes "
                             "that update_weights_from_distributed was given")
        self._broadcast(tensor)

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...], name: str = "") -> torch.Tensor:
        """At the others: the next tensor of rank 0, of this name if rank 0 gives one. Raises ValueError if rank 0 has another
        name, dtype or shape, or another rank expects another (the group may go on), RuntimeError if a rank fails or takes too
        long."""
        header = torch.zeros(_HEADER, dtype=torch.uint8, device=self.device)
        self._broadcast(header)
        sent, wanted = bytes(header.tolist()).decode().strip(), _described(dtype, shape, name)
        other = sent not in (wanted, _described(dtype, shape, ""))
        refusals = self._refusals(other)
        if other:
            raise ValueError(f"rank 0 sends {sent}, and {wanted} was announced")
        if refusals:
            raise ValueError(f"another rank does not expect {wanted}")
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._broadcast(tensor)
        return tensor

    def _refusals(self, refuse: bool) -> int:
        """How many ranks refuse the next tensor."""
        count = torch.tensor([int(refuse)], dtype=torch.int32, device=self.device)
        self._group.allreduce([count], dist.AllreduceOptions()).wait(self._wait)
        return int(count.item())

    def _broadcast(self, tensor: torch.Tensor) -> None:
        whole = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor  # bytes: gloo lacks some dtypes
        self._group.broadcast([whole], dist.BroadcastOptions()).wait(self._wait)
        if self.device.type == "cuda":
            synchronize(self.device)  # a failure shows here, and not in a later step

    def close(self) -> None:
        """Leave the group."""
        shutdown = getattr(self._group, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self._group = None


def _described(dtype: torch.dtype, shape: Iterable[int], name: str) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {name}".strip()


def _process_group(backend: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    if backend == "nccl":
        if not dist.is_nccl_available():
            raise ValueError("backend 'nccl' is not in this build of torch; use 'gloo' with tensors on the CPU")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # Waits on the host, and raises. By default a watchdog ends the process, and the engine with it, when a rank is gone.
        before = os.environ.get(_BLOCKING)
        os.environ[_BLOCKING] = "1"  # read by the constructor
        try:
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
        finally:
            if before is None:
                del os.environ[_BLOCKING]
            else:
                os.environ[_BLOCKING] = before
    raise ValueError(f"backend must be 'nccl' or 'gloo', got {backend!r}")

"""New weights for an engine that goes on serving: checked as a whole, then copied in place.

Parameters keep their addresses, so compiled graphs and captured CUDA graphs stay valid; only values change. An update is all
or nothing: names, shapes, dtypes and files are checked, and what comes from elsewhere (a file, another process) is read
completely, before the first value is written. An update that fails leaves the engine with its old weights; the error names
the parameter. Requests that run are recomputed from their tokens, since their cache holds keys of the old weights.

Refused by name: parameters whose memory is not the tensor that a checkpoint has (quantized or packed subclasses), and dtypes
that a copy would not convert faithfully (integers, 8-bit floats).
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.graph_runner.checkpoint import read_checkpoint, save_checkpoint
from quire.graph_runner.engine_lock import EngineLock, locked
from quire.graph_runner.weights_group import WeightsGroup
from quire.passes.tensor_version import has_version, version_of
from quire.passes.verify.quantized import holds_codes

logger = logging.getLogger(__name__)
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class WeightUpdateError(ValueError):
    """An update of the weights that was refused or failed; nothing was written. ``name``: of the parameter, if there is one."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(f"{message}. The engine serves its old weights")
        self.name = name


class WeightSpec(NamedTuple):
    """The update expected for one parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype given by name ("bfloat16") or as it is. Raises WeightUpdateError for another name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise WeightUpdateError(f"{dtype!r} is not a torch dtype; give names such as 'bfloat16'")
    return found


def check_specs(model: torch.nn.Module, specs: Iterable[WeightSpec]) -> dict[str, torch.Tensor]:
    """The parameters that an update would write, by name. Raises WeightUpdateError for a name that the model has not, or twice;
    another shape; a dtype that is not converted; a parameter that is not a plain tensor."""
    state, found = model.state_dict(keep_vars=True), {}  # the tensors themselves, tied ones under each name
    for name, dtype, shape in specs:
        if name not in state:
            near = difflib.get_close_matches(name, state, 3)
            raise WeightUpdateError(f"{type(model).__name__} has no parameter {name!r}" + (
                f"; near names are {', '.join(near)}" if near else f"; its first are {', '.join(list(state)[:3])}"), name)
        if name in found:
            raise WeightUpdateError(f"the parameter {name!r} is given twice", name)
        target = state[name]
        if holds_codes(target):
            raise WeightUpdateError(
                f"the parameter {name!r} is quantized ({type(target).__name__}): its memory holds codes and scales, not the "
                "values of a checkpoint. Quantize a model with the new weights and make a new engine", name)
        if target.device.type == "meta":
            raise WeightUpdateError(f"the parameter {name!r} has no memory (it is offloaded, or on the meta device)", name)
        if torch._debug_has_internal_overlap(target) == 1:
            raise WeightUpdateError(f"elements of the parameter {name!r} share memory (it was made by expand): it cannot have "
                                    "any values", name)
        if tuple(shape) != tuple(target.shape):
            raise WeightUpdateError(f"the parameter {name!r} has shape {tuple(target.shape)}, its update {tuple(shape)}", name)
        if dtype != target.dtype and not (_converts(dtype) and _converts(target.dtype)):
            raise WeightUpdateError(
                f"the parameter {name!r} has dtype {target.dtype}, its update {dtype}: only floating-point numbers of 16 bits "
                "or more are converted, codes of quantized weights must be given as they are stored", name)
        found[name] = target
    return found


def _converts(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def missing_names(model: torch.nn.Module, given: Iterable[str]) -> list[str]:
    """Names of the model that ``given`` does not cover, neither itself nor by a name tied to it."""
    state = model.state_dict(keep_vars=True)
    covered = {_memory(state[name]) for name in given if name in state}
    return [name for name, tensor in state.items() if _memory(tensor) not in covered]


def _memory(tensor: torch.Tensor) -> Any:
    """What two names of one (tied) parameter have in common: the object, or its memory."""
    address = 0 if holds_codes(tensor) or tensor.layout is not torch.strided else tensor.data_ptr()
    return (address, tensor.dtype, tensor.shape, tensor.stride()) if address else id(tensor)


def write(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy checked values into the parameters. Conversions are made first: copying alone needs no memory, and cannot fail.
    Raises WeightUpdateError if two names of one (tied) parameter have different values, or a value could not be converted;
    nothing is written."""
    written = {part.untyped_storage().data_ptr() for part in targets.values()}
    ready: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}  # of each parameter, the first
    for name, value in values.items():
        target = targets[name]
        try:
            value = value.detach().to(target.dtype)
            if value.device != target.device and not (value.is_contiguous() and target.is_contiguous()):
                value = value.to(target.device)  # copy_ would need memory for that
            # A value that is itself a parameter to be written, such as one of two that are exchanged.
            ready[name] = value.clone() if value.untyped_storage().data_ptr() in written else value
        except RuntimeError as error:  # out of memory, too
            raise WeightUpdateError(f"the update of the parameter {name!r} could not be converted: {error}", name) from error
        first = names.setdefault(_memory(target), name)
        if first != name and not torch.allclose(ready[first].to(value.device), value, rtol=0, atol=0, equal_nan=True):
            raise WeightUpdateError(f"{name!r} and {first!r} are one parameter of this model (tied weights), and their updates "
                                    "differ. Give one of them, or load a model that does not tie them", name)
    for name, value in ready.items():
        with torch.inference_mode(not has_version(targets[name])), torch.no_grad():
            targets[name].copy_(value)


def _plain(name: str, value: Any) -> torch.Tensor:
    """A value as a tensor of numbers, gathered from all ranks. Raises WeightUpdateError if it is none."""
    gather = getattr(value, "full_tensor", None)
    value = gather() if callable(gather) else value
    if not isinstance(value, torch.Tensor) or holds_codes(value) or value.layout is not torch.strided or (
            value.device.type == "meta"):
        what = f"a {type(value).__name__}" + (f" on {value.device}, {value.layout}" if isinstance(value, torch.Tensor) else "")
        raise WeightUpdateError(f"the update of the parameter {name!r} must be a plain tensor, got {what}", name)
    return value


def _check_lasting(pairs: Sequence[tuple[str, torch.Tensor]], versions: Sequence[int], targets: Mapping[str, torch.Tensor]
                   ) -> None:
    """Refuse tensors of an iterator that used their memory for later ones, or freed it. ``versions``: when they came."""
    reached, before = 0, ""  # the end of memory so far, and whose it is
    for (name, value), version in sorted(zip(pairs, versions, strict=True), key=lambda item: item[0][1].data_ptr()):
        begin = value.data_ptr()
        size = value.element_size() * (1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)))
        room = value.untyped_storage().nbytes() - value.element_size() * value.storage_offset()
        dense = value.numel() > 0 and value.is_contiguous()  # others may be columns of one matrix
        shared = dense and begin < reached and _memory(targets[name]) != _memory(targets[before])
        if value.numel() and room < size or shared or version_of(value) != version:
            raise WeightUpdateError(f"the update of the parameter {name!r} was overwritten or freed when another came: give a "
                                    "list, or copies: ((name, tensor.clone()) for name, tensor in ...)", name)
        if dense and begin + size > reached:
            reached, before = begin + size, name


class WeightUpdates:
    """The calls of an engine for its weights. Each waits for the engine step in progress, and holds up the next one."""

    model: torch.nn.Module
    tokenizer: Any
    scheduler: Any
    runner: Any
    lock: EngineLock
    collect: Callable[..., None]
    _closed: bool
    _weights_group: WeightsGroup | None = None

    @locked
    def update_weights_from_tensors(self, named_tensors: NamedTensors) -> None:
        """Copy tensors into the parameters of these names; the others stay.

        Args:
            named_tensors: (name, tensor) pairs or a mapping, names as in ``model.state_dict()``, on any device. Those of an
                iterator must keep their values when the next one comes, or be copies.

        Raises:
            WeightUpdateError: see ``check_specs``; nothing is written then. RuntimeError: the engine is closed.
        """
        given = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        pairs, versions = list[tuple[str, torch.Tensor]](), list[int]()
        for name, value in given:
            pairs.append((name, _plain(name, value)))
            versions.append(version_of(pairs[-1][1]))
        targets = check_specs(self.model, (WeightSpec(name, t.dtype, tuple(t.shape)) for name, t in pairs))
        if not isinstance(given, Collection):
            _check_lasting(pairs, versions, targets)
        self._write(targets, dict(pairs))

    @locked
    def update_weights_from_disk(self, path: str | Path) -> None:
        """Copy a checkpoint of the same architecture into the model: a folder of safetensors files, whole or in shards.

        A checkpoint whose names differ from the model's (transformers renames or merges some) is loaded with transformers into
        a second model in host memory first.

        Raises:
            WeightUpdateError: a parameter is missing, has another shape or dtype, or a file is incomplete; nothing is written.
            FileNotFoundError: no checkpoint there.
        """
        self._check_open()
        try:
            values = read_checkpoint(Path(path), self.model)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise WeightUpdateError(f"the checkpoint {path} cannot be read: {error}", getattr(error, "name", None)) from error
        targets = check_specs(self.model, (WeightSpec(name, t.dtype, tuple(t.shape)) for name, t in values.items()))
        if missing := missing_names(self.model, values):
            raise WeightUpdateError(f"the checkpoint {path} lacks the parameter {missing[0]!r}" + (
                f" and {len(missing) - 1} others" if len(missing) > 1 else ""), missing[0])
        self._write(targets, values)

    @locked
    def init_weights_update_group(self, master_address: str, master_port: int, rank: int, world_size: int, *,
                                  group_name: str = "quire", backend: str | None = None, timeout: float = 300.0) -> None:
        """Join a process group whose rank 0 sends weights (``quire.graph_runner.weights_group.WeightsGroup``, in the trainer).

        Args:
            rank: of this process, 1 to world_size - 1.
            backend: "nccl" or "gloo"; by default what the model's device needs.
            timeout: seconds to wait for the others, here and at every update.

        Raises:
            ValueError: a rank outside the group. RuntimeError: already in a group, or the others did not come in time.
        """
        self._check_open()
        if self._weights_group is not None:
            raise RuntimeError("the engine is in a group for weight updates already; call destroy_weights_update_group first")
        if rank == 0:
            raise ValueError("rank 0 sends the weights; an engine receives them, as rank 1 to world_size - 1")
        device = next(self.model.parameters()).device
        self._weights_group = WeightsGroup(master_address, master_port, rank, world_size, group_name=group_name,
                                           backend=backend, device=device, timeout=timeout)

    @locked
    def update_weights_from_distributed(self, names: Iterable[str], dtypes: Iterable[torch.dtype | str],
                                        shapes: Iterable[Iterable[int]]) -> None:
        """Receive these parameters from rank 0 of the group, in this order, and write them once all are here.

        Raises:
            WeightUpdateError: see ``check_specs`` (the sender then waits until its timeout); rank 0 sends another name, dtype
                or shape (it gets a ValueError, and the group stays); a rank failed.
            RuntimeError: not in a group.
        """
        if self._weights_group is None:
            raise RuntimeError("the engine is in no group for weight updates; call init_weights_update_group first")
        columns = list(names), [dtype_of(d) for d in dtypes], [tuple(s) for s in shapes]
        if len({len(column) for column in columns}) > 1:
            raise WeightUpdateError(f"names, dtypes and shapes describe {len(columns[0])}, {len(columns[1])} and "
                                    f"{len(columns[2])} parameters; the numbers must be equal")
        specs = [WeightSpec(*spec) for spec in zip(*columns, strict=True)]
        targets, values = check_specs(self.model, specs), {}
        for spec in specs:
            try:
                values[spec.name] = self._weights_group.receive(spec.dtype, spec.shape, spec.name)
            except ValueError as error:  # all ranks know of it
                raise WeightUpdateError(f"the parameter {spec.name!r} is not what comes: {error}", spec.name) from error
            except Exception as error:
                self.destroy_weights_update_group()  # the ranks no longer agree on what comes next
                raise WeightUpdateError(f"receiving the parameter {spec.name!r} failed: {error}", spec.name) from error
        self._write(targets, values)

    @locked
    def destroy_weights_update_group(self) -> None:
        """Leave the group. Safe to call without one."""
        if self._weights_group is not None:
            self._weights_group.close()
            self._weights_group = None

    @locked
    def get_weights_by_name(self, name: str, truncate_size: int | None = None) -> torch.Tensor:
        """A copy of a parameter, or of its first ``truncate_size`` rows. Raises KeyError if the model has no such parameter."""
        state = self.model.state_dict()
        if name not in state:
            near = difflib.get_close_matches(name, state, 3)
            raise KeyError(f"{type(self.model).__name__} has no parameter {name!r}; near names are {', '.join(near) or 'none'}")
        return (state[name] if truncate_size is None else state[name][:truncate_size]).clone()

    @locked
    def save_sharded_model(self, path: str | Path, max_size: int | str = "5GB") -> None:
        """Write the weights as safetensors files of at most ``max_size``, with an index, the config and the tokenizer:
        ``quire.Engine(path)``, ``from_pretrained`` and ``update_weights_from_disk`` read them. Raises ValueError, and writes
        nothing, for a quantized parameter that cannot be written; names it."""
        save_checkpoint(Path(path), self.model, self.tokenizer, max_size)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")

    def _write(self, targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Write checked values between two steps; running requests start again from their tokens."""
        self._check_open()
        self.runner.editor.check_outside()
        began = time.perf_counter()
        self.collect()
        try:
            write(targets, values)
        except WeightUpdateError:  # nothing was written
            raise
        except BaseException:
            self.scheduler.preempt_all()
            raise
        self.scheduler.preempt_all()
        logger.info("weights: %d parameters updated in %.3f s", len(targets), time.perf_counter() - began)

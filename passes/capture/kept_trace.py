"""Traces kept on disk, so that a later process takes the graph from there instead of walking the model with Dynamo.

A file holds the graph as Dynamo gave it, and the facts that it follows from (``passes/capture/facts.py``): every guard of the
trace, what its code can ask without a guard (``passes/capture/unguarded.py``), the source files of that code, versions and
state of PyTorch. What differs, cannot be compared, or fails means that the model is traced. The graph's fake values are
computed again, and must be those of the trace, as must be the guards on sizes. Everything after the trace runs as if Dynamo
had just traced it.

On GPUs; QUIRE_TRACE_CACHE=0 turns it off, =1 on everywhere. Files are pickles in ``cache_folder()``, which must be the user's
own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import logging
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from quire.attn_ops.tuning.store import cache_folder
from quire.passes import sources
from quire.passes.capture.facts import (
    TORCH_VALUES,
    Check,
    NotPortable,
    Values,
    checks,
    difference,
    environment,
    module_names,
    together,
)
from quire.passes.capture.kept_verdicts import KeptVerdicts
from quire.passes.capture.unguarded import Asked, asked_by, description
from quire.passes.fake_values import At, Replay, Symbols, symbolic_sizes
from quire.passes.fx import fake_mode, graph_module, source_name, source_of, storage_of, text_of, value

logger = logging.getLogger(__name__)
_MOST_FILES = 64  # the oldest go
_GLOBAL = re.compile(r"G\['(\w+)'\]")
_text = functools.lru_cache(maxsize=4096)(str)


class _Node(NamedTuple):
    name: str
    op: str
    target: str
    args: Any
    kwargs: Any
    module: str  # as ``module_path`` reads it
    value: Any
    source: Any = None  # Dynamo's, of a placeholder


class _Globals(dict[str, Any]):
    """Of the traced module. Dynamo adds the built-in functions, under a name that it counts up from trace to trace."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict___"):
            return vars(builtins)
        raise KeyError(name)


class Taken(NamedTuple):
    """A graph from the disk. ``read``: gives its inputs, of a call's arguments by name. ``reads``: for ``Reads.restore``."""

    gm: fx.GraphModule
    inputs: list[Any]
    context: TracingContext
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    scope: Mapping[str, Any]
    reads: Any


@dataclass(frozen=True)
class KeptTrace:
    """A graph and what it follows from. See the module's docstring."""

    environment: str
    modules: dict[str, str]  # digests of the source files of the Python modules that were read, by their names
    imports: dict[str, str]  # Dynamo's names of modules among the globals, and the modules' own
    checks: list[Check]
    code: bytes  # that evaluates their expressions
    asked: Asked  # by the code that was traced
    answers: dict[str, Any]  # of ``description``: what Dynamo has no guard for
    reads: Any  # of ``Reads.stored``
    nodes: list[_Node]
    guards: frozenset[str]  # conditions on sizes that the trace met

    def stale(self, scope: Mapping[str, Any], model: torch.nn.Module) -> str | None:
        """What differs now, or None. ``scope``: for the expressions of the trace, with what they mean now."""
        if self.environment != environment(next(model.parameters()).device):
            return "versions or the state of PyTorch"
        now = _modules_of(model, {*self.modules})
        if now != self.modules:
            return f"the source of {', '.join(sorted({n for n, _ in now.items() ^ self.modules.items()})[:3])}"
        values, sources = Values(scope), _sources(self.checks)
        values.evaluate(sources, self.code)
        if (why := difference(self.checks, values)) is not None:
            return why
        found = description(sources, values, self.asked)
        return next((what for what, answer in self.answers.items() if found[what] != answer), None)

    def rebuild(self, scope: Mapping[str, Any]) -> Taken:
        """The graph, computed with fake values. Raises NotPortable if they are not those of the trace."""
        env = Symbols(allow_scalar_outputs=torch._dynamo.config.capture_scalar_outputs,
                      allow_dynamic_output_shape_ops=torch._dynamo.config.capture_dynamic_output_shape_ops)
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=False)
        graph, made = fx.Graph(), list[fx.Node]()
        for kept in self.nodes:
            args, kwargs = _mapped(kept, lambda a: made[a.index] if isinstance(a, At) else a)
            target = _resolve(kept.target) if kept.op == "call_function" else kept.target
            node = graph.create_node(kept.op, target, args, kwargs, name=kept.name)
            if node.name != kept.name:
                raise NotPortable(f"the name {kept.name}")
            if kept.module:
                node.meta["nn_module_stack"] = {kept.module: (kept.module, torch.nn.Module)}
            if kept.source is not None:
                node._dynamo_source = kept.source
            made.append(node)
        gm = graph_module(torch.nn.Module(), graph)
        inputs, fakes = self._inputs(made, mode, scope)
        with mode, enable_python_dispatcher(), torch.no_grad():
            Replay(gm, mode).run(*fakes)
        for kept, node in zip(self.nodes, made, strict=True):
            if kept.value != (now := _summary(value(node))):
                raise NotPortable(f"{kept.name} is {now}, and was {kept.value}")
        if (found := _conditions(env)) != self.guards:
            raise NotPortable(f"conditions on sizes are {sorted(found)}, and were {sorted(self.guards)}")
        texts = [text_of(node.source) for node in self.nodes if node.op == "placeholder"]
        read = eval(f"lambda L: ({', '.join(texts)},)", {"G": scope["G"]})
        return Taken(gm, inputs, TracingContext(mode), read, scope["G"], self.reads)

    def _inputs(self, made: Sequence[fx.Node], mode: FakeTensorMode, scope: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Real and fake values of the placeholders. A symbol is the size of a tensor among them."""
        inputs, fakes = list[Any](), list[Any]()
        symbols: dict[str, Any] = {}
        for kept, node in zip(self.nodes, made, strict=True):
            if kept.op != "placeholder":
                continue
            real = eval(source_name(node), dict(scope))
            inputs.append(real)
            if not isinstance(real, torch.Tensor):
                fakes.append(kept.value)
                continue
            dynamic = [isinstance(size, str) for size in kept.value.shape]
            context: Any = _context(real, dynamic) if any(dynamic) else None
            fakes.append(mode.from_tensor(real, static_shapes=context is None, source=kept.source, symbolic_context=context))
            symbols.update({str(size.node._expr): size for size in fakes[-1].shape if isinstance(size, torch.SymInt)})
        try:
            fakes = [symbols[fake.name] if isinstance(fake, _Size) else fake for fake in fakes]
        except KeyError as error:
            raise NotPortable(f"the size {error}") from error
        return [fake if isinstance(fake, torch.SymInt) else x for x, fake in zip(inputs, fakes, strict=True)], fakes


def _context(real: torch.Tensor, dynamic: Sequence[bool]) -> Any:
    """Which sizes of an input are symbols, as Dynamo says it. Of a view's base none: a symbol more would give the later ones
    other names, under which no compilation of an earlier start is found."""
    base = real._base
    return symbolic_sizes(dynamic, None if base is None else _context(base, [False] * base.dim()))


class _Tensor(NamedTuple):
    kind: Any
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool


class _Size(NamedTuple):
    """A size or number that is a symbol, by its expression."""

    name: str


def _node(node: fx.Node, at: Mapping[fx.Node, int]) -> _Node:
    if node.op in ("get_attr", "call_module"):
        raise NotPortable(f"{node.name}: a part of the graph is in an attribute")
    target = node.target if isinstance(node.target, str) else _reference(node.target)

    def kept(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return At(at[x])
        if x is None or x is ... or isinstance(x, (bool, int, float, complex, str, *TORCH_VALUES)):
            return x
        raise NotPortable(f"an argument of type {type(x).__name__}")

    args, kwargs = _mapped(node, kept)
    stack = node.meta.get("nn_module_stack")
    source = source_of(node) if node.op == "placeholder" else None
    return _Node(node.name, node.op, target, args, kwargs, list(stack.values())[-1][0] if stack else "",
                 _summary(value(node)), source)


def proving_once(trace_file: Path) -> Callable[[fx.Graph, Callable[[], object]], None]:
    """Runs the proof of a graph that was made of a trace, unless an equal graph has passed it. A proof reads a graph and the
    metadata of its values, and nothing of weights; what operations do, as far as they are quire's or PyTorch's, is in the name
    of the file."""
    verdicts = KeptVerdicts(trace_file, "proofs")

    def prove(graph: fx.Graph, run: Callable[[], object]) -> None:
        try:
            digest = _digest(graph)
        except Exception:  # NotPortable, or of an odd object in the graph
            run()
            return
        if not verdicts.has(digest):
            run()
            verdicts.add(digest)

    return prove


def _digest(graph: fx.Graph) -> str:
    """Of the nodes, the metadata of their values, and which of these share memory. Raises NotPortable, also for an operation
    of another library, of which another version may do something else."""
    at, places = {node: i for i, node in enumerate(graph.nodes)}, dict[int, int]()
    found = hashlib.blake2b(digest_size=16)
    for node in graph.nodes:
        if _library_of(node.target) not in ("", "aten", "prims", "quire"):
            raise NotPortable(f"the operator {node.target}")
        tensors = [t for t in tree_leaves(value(node)) if isinstance(t, torch.Tensor)]
        shared = [places.setdefault(storage_of(t), len(places)) for t in tensors]
        source = source_name(node) if node.op == "placeholder" else ""
        found.update(repr((_node(node, at)._replace(source=None), source, shared)).encode())
    return found.hexdigest()


def _library_of(target: Any) -> str:
    """Of an operator; "" of anything else."""
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    return packet._qualified_op_name.partition("::")[0] if isinstance(packet, torch._ops.OpOverloadPacket) else ""


def _mapped(node: _Node | fx.Node, change: Callable[[Any], Any]) -> tuple[Any, Any]:
    return fx.node.map_aggregate(node.args, change), fx.node.map_aggregate(node.kwargs, change)


def _summary(x: Any) -> Any:
    """What the trace says of a value, to compare: metadata of tensors, expressions of sizes. Raises NotPortable."""
    if isinstance(x, torch.Tensor):
        kind = isinstance(x, torch.nn.Parameter), type(x).__name__.replace("Parameter", "FakeTensor")  # and of which subclass
        sizes, strides = (tuple(_text(n.node.expr) if isinstance(n, torch.SymInt) else n for n in of)
                          for of in (x.shape, x.stride()))
        return _Tensor(kind, sizes, strides, x.dtype, str(x.device), x.requires_grad)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _Size(str(x))
    if isinstance(x, (list, tuple)):
        return [_summary(each) for each in x]
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device, torch.Size)):
        return x
    raise NotPortable(f"a value of type {type(x).__name__}")


def _reference(target: Any) -> str:
    """Where a function of the graph is found: an operator, or a function of PyTorch or Python that computes from its arguments
    alone. Raises NotPortable for any other: a higher-order operator may hold numbers that mean something in one process."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        text = f"torch.ops.{namespace}.{name}.{target._overloadname}"
    elif isinstance(target, torch._ops.HigherOrderOperator):
        raise NotPortable(f"the higher-order operator {target}")
    else:
        text = fx.node._get_qualified_name(target)
        text = text if "." in text else f"builtins.{text}"
    if text.partition(".")[0] not in ("torch", "_operator", "math", "builtins") or _resolve(text) is not target:
        raise NotPortable(f"the function {text}")
    return text


@functools.lru_cache(maxsize=4096)
def _resolve(text: str) -> Any:
    parts = text.split(".")
    for i in range(len(parts) - 1, 0, -1):
        found = sys.modules.get(".".join(parts[:i]))
        with contextlib.suppress(AttributeError):
            if found is not None:
                return functools.reduce(getattr, parts[i:], found)
    raise NotPortable(f"the function {text}")


def _sources(of: Sequence[Check]) -> list[str]:
    return list(dict.fromkeys(check.source for check in of))


def _conditions(env: ShapeEnv | None) -> frozenset[str]:
    return frozenset() if env is None else frozenset(str(guard.expr) for guard in env.guards)


def _modules_of(model: torch.nn.Module, others: set[str]) -> dict[str, str]:
    """Digests of the files of the model's classes and of ``others``, but PyTorch's, which has a version. What Dynamo has no
    guard for is at least where it was: a default of ``getattr``, an ABC's register, two names for one object."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__} | others
    return {name: digest for name in names if name.partition(".")[0] not in ("torch", "builtins")
            and (digest := _file_digest(getattr(sys.modules.get(name), "__file__", None)))}


def _file_digest(path: str | None) -> str:
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=12).hexdigest() if path else ""
    except OSError:
        return ""


@contextlib.contextmanager
def _unless_it_fails() -> Iterator[None]:
    """What fails inside (an odd object among what was read, a full disk) is logged: the trace is good, and is not kept."""
    try:
        yield
    except Exception as error:
        logger.info("this trace is not kept: %s: %s", type(error).__name__, error)


class TraceFile:
    """Where the trace of a model is kept, if it is. ``model``: as it is about to be traced, in the state of the process that
    the trace will meet. ``local``: the arguments of the traced method. ``more``: what else the trace depends on."""

    def __init__(self, model: torch.nn.Module, local: Mapping[str, Any], *more: Any) -> None:
        self._model, self._local = model, local
        self._state = environment(next(model.parameters()).device)
        tensors = [(name, str(p.dtype), str(p.device), tuple(p.shape)) for name, p in model.named_parameters()]
        classes = [(cls.__module__, cls.__qualname__) for cls in type(model).__mro__]  # ``paged`` gives a model another class
        key = repr((sources.digest(), self._state, classes, tensors, more))
        self.path = cache_folder() / "traces" / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.pickle"
        self._nodes, self._guards = list[_Node](), frozenset[str]()
        self._checks: list[Check] | None = None
        self._asked: Asked | None = None
        self._answers: dict[str, Any] = {}
        self._held: Sequence[str] = ()
        self._mentioned = set[str]()  # Python modules

    @classmethod
    def of(cls, model: torch.nn.Module, local: Mapping[str, Any], *more: Any) -> TraceFile | None:
        """None where traces are not kept."""
        chosen, device = os.environ.get("QUIRE_TRACE_CACHE", ""), next(model.parameters()).device
        if chosen == "0" or not (chosen or device.type == "cuda"):
            return None
        try:
            found = cls(model, local, *more)
            return None if found._state is None else found
        except Exception as error:  # of an option that this version of PyTorch does not have, say
            logger.info("traces are not kept: %s: %s", type(error).__name__, error)
            return None

    def note_graph(self, gm: fx.GraphModule, held: Sequence[str]) -> None:
        """Note the graph of a trace, before compiling it adds conditions on sizes. ``held``: of ``check_side_effects``."""
        self._held, self._asked, self._nodes = held, None, []
        at, mode = {node: i for i, node in enumerate(gm.graph.nodes)}, fake_mode(gm.graph)
        with _unless_it_fails():
            self._asked = asked_by(TracingContext.get_traced_code() or ())
            self._guards = _conditions(None if mode is None else mode.shape_env)
            self._nodes = [_node(node, at) for node in gm.graph.nodes]

    def note_guards(self, guards: Sequence[Any], owner: Any, scope: Mapping[str, Any]) -> None:
        """Note what the trace of a method of ``owner`` read. Arguments: of ``Reads.add``."""
        self._checks = None
        with _unless_it_fails():
            if self._asked is None:  # ``note_graph`` has failed
                return
            values = Values(self._scope(owner, scope, {}))
            found = checks(guards, values, self._held)
            self._mentioned = module_names(found, values) | self._asked.modules
            self._answers = description(_sources(found), values, self._asked)
            self._checks = found

    def write(self, gm: fx.GraphModule, scope: Mapping[str, Any], reads: Any) -> bool:
        """Keep what was noted of the trace ``gm``, and remove the oldest files beyond 64. ``reads``: of ``Reads.stored``.
        Returns whether it is kept."""
        state = self._state
        if self._checks is None or self._asked is None or not self._nodes or state is None or any(
                key.startswith("quire_") for key in gm.meta):
            return False  # the last: notes of graph breaks and side effects
        with _unless_it_fails():
            names = {name for check in self._checks for name in _GLOBAL.findall(f"{check.source} {check.name}")} | {
                name for node in self._nodes if node.op == "placeholder" for name in _GLOBAL.findall(text_of(node.source))}
            imports = {name: held.__name__ for name in names if isinstance(held := scope.get(name), types.ModuleType)}
            modules = _modules_of(self._model, {*imports.values(), *self._mentioned})
            data = pickle.dumps(KeptTrace(
                state, modules, imports, self._checks, together(_sources(self._checks)), self._asked, self._answers, reads,
                self._nodes, self._guards))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = self.path.with_suffix(f".{os.getpid()}")
            written.write_bytes(data)
            written.replace(self.path)  # whoever reads has the old file or the new one
            files = sorted(self.path.parent.glob("*.pickle"), key=lambda file: file.stat().st_mtime)
            for old in files[:-_MOST_FILES]:
                for each in self.path.parent.glob(f"{old.stem}.*"):
                    each.unlink(missing_ok=True)
            return True
        return False

    def take(self, owner: Any, scope: Mapping[str, Any]) -> Taken | None:
        """The graph that is kept for the model as it is, or None. Arguments: of ``note_guards``."""
        try:
            kept = pickle.loads(self.path.read_bytes())
            if not isinstance(kept, KeptTrace):
                raise NotPortable("it is not a trace")
            names = self._scope(owner, scope, kept.imports)
            why = kept.stale(names, self._model)
            if why is None:
                return kept.rebuild(names)
        except FileNotFoundError:
            return None
        except Exception as error:  # a file cut short, of other versions, or of something else
            why = f"{type(error).__name__}: {error}"
        logger.info("the trace that is kept is of another model or another state, and the model is traced: %s", why)
        return None

    def _scope(self, owner: Any, scope: Mapping[str, Any], imports: Mapping[str, str]) -> dict[str, Any]:
        """Names in the expressions of a trace: arguments, and globals, to which Dynamo adds modules and built-in functions."""
        local = {"self": owner, **self._local}
        modules = {name: sys.modules[module] for name, module in imports.items()}
        return {**local, "L": local, "G": _Globals({**scope, **modules})}

"""The options of an engine: each declared once, with its type, default, range and help text.

``quire.Engine``, ``quire.paged``, the command line (``--engine key=value``), ``quire bench`` and the model runner all read
``EngineConfig``. Nothing heavy is imported here, so that ``quire --help`` stays quick.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from quire.graph_runner.buckets import Policy

if TYPE_CHECKING:
    import torch

    from quire.passes.options import QuireOptions


T = TypeVar("T", bound=type)


def _option(default: Any, help: str, *, least: int | None = None) -> Any:
    return field(default=default, metadata={"help": help, "least": least})


#: Why an option has its lower bound, where the number does not say it.
_WHY = {"num_pages": " (page 0 is the null page)", "max_model_len": " (a prompt token and a generated one)"}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Validated options of ``quire.Engine``, whose docstring lists them. Raises ValueError, which names the option, for a value
    of the wrong type or out of range."""

    attention: str | Mapping[str, str] = _option(
        "auto", 'attention backend, "auto", or one for each kind of layer: full=NAME,window=NAME (quire.backends() lists them)')
    page_size: int = _option(16, "tokens per page of the KV cache", least=1)
    num_pages: int | None = _option(
        None, "pages of the KV cache, the null page included. None: what fits in GPU memory, 256 MiB on a CPU", least=2)
    max_num_seqs: int = _option(256, "maximum number of requests running at once", least=1)
    max_num_batched_tokens: int = _option(
        8192, "maximum number of tokens per step; longer prompts are computed in chunks", least=1)
    kv_cache_dtype: str | torch.dtype = _option(
        "auto", 'dtype of the KV cache: "auto" (the model\'s), "int8", "fp8" (e4m3), "fp8_e5m2", a torch dtype or its name')
    kv_scales: float | Mapping[int, tuple[float, float]] | None = _option(
        None, "fixed scales of an fp8 KV cache: a number, or {layer: (of keys, of values)}. Keys and values above 448 (e5m2: "
        "57344) times their scale become NaN, and the requests that attend to them fail. None: a scale for each token and key "
        "head, for which any size fits")
    dtype: str | torch.dtype | None = _option(
        None, "dtype that the engine computes in, as a torch dtype or its name. None: the model's own. Another one, such as "
        "bfloat16 for a model trained in float32: the engine keeps a copy of the parameters and persistent buffers that "
        "differ, which follows them; memory for the copy, none for a model that has that dtype already or is given as a path")
    max_model_len: int | None = _option(
        None, "maximum length of a request, prompt and continuation. None: what the model and the cache allow", least=2)
    gpu_memory_utilization: float = _option(
        0.9, "fraction of the GPU's memory that may be in use, in (0, 1]; sizes the KV cache")
    kv_layout: Literal["NHD", "HND"] | None = _option(
        None, 'layout of the KV cache, "NHD" or "HND". None: the environment variable QUIRE_KV_CACHE_LAYOUT, or "NHD"')
    prefill_chunk_size: int | None = _option(
        None, "maximum number of prompt tokens of one request per step. None: max_num_batched_tokens", least=1)
    cudagraph_capture_sizes: Sequence[int] | Policy | None = _option(
        None, 'decode batch sizes to capture, or the name of a list: "sglang", "vllm", "powers". None: the default buckets, '
        "[]: none")
    cudagraph_token_sizes: Sequence[int] | Policy | None = _option(
        None, "token counts of mixed batches to capture, for backends that allow it, or the name of a list. None: default "
        "buckets on a GPU, none on a CPU. []: none")
    max_cudagraph_capture_size: int | None = _option(
        None, "maximum number of tokens of a captured step, where sizes are not listed one by one. None: max_num_seqs for "
        "decode steps, and 1024 for mixed ones, or more for models of small matrices on a fast GPU, as far as launching a step "
        "takes longer than running it", least=1)
    cudagraph_lazy: bool = _option(
        False, "False: capture all batch sizes before the engine is ready, so that no request waits for a capture and memory "
        "for the graphs is there: steady times from the first request on. True, for a quick start: capture the largest then, "
        "any other when the first batch of it comes, and the rest one by one between decode steps, in at most a fifth of the "
        "time; no other thread may then call torch.cuda.synchronize or draw random numbers on that GPU")
    cudagraph_debug: bool = _option(
        False, "check at each replay that a graph's inputs are where they were, and fill padding with wild values")
    cudagraph_piecewise: bool = _option(
        False, "capture batches for which the attention backend allows no CUDA graph (flashinfer's with prompts) in pieces, "
        "between its attention calls")
    compiler: str = _option(
        "auto", '"inductor", "inductor-whole", "eager", or "auto": inductor on a GPU, eager on a CPU, where compiling takes '
        "longer than it saves")
    fusions: str | Sequence[str] = _option(
        "auto", 'fusion passes: "all", "none", "auto" (all on a GPU, none on a CPU), or names (a sequence, or comma-separated)')
    enable_prefix_caching: bool | None = _option(
        None, "compute equal beginnings of prompts once. None: of requests that wait or run together. True: pages of finished "
        "requests are kept for later ones too, until memory is needed or the weights change; after a change that PyTorch does "
        "not count (writes through p.data) call reset_prefix_cache. False: never")
    enable_lora: bool = _option(
        False, "trace the model so that each request may have PEFT's adapters of its own (adapter=). Without it the first such "
        "request, or the first change of the active or merged adapters, has the model traced again")
    max_loras: int | None = _option(
        None, "LoRA adapters that a trace has room for, beside DoRA: one that the model gets while the engine is open is then "
        "served without a new trace. They are copied, which takes memory. None: those of the model, none copied, and an "
        "adapter that is added or deleted has the model traced again", least=1)
    max_lora_rank: int | None = _option(
        None, "rank that each of max_loras has room for. None: 16, or the greatest of the model's adapters", least=1)
    max_waiting: int | None = _option(
        None, "maximum number of requests that wait for a slot; more are refused. None: no limit", least=0)
    max_logprobs: int = _option(
        20, "maximum of logprobs, prompt_logprobs and logprob_token_ids of a request: tokens per position", least=0)
    kv_sharing_fast_prefill: bool = _option(
        False, "in models whose last layers attend to the keys and values of earlier ones (gemma3n, gemma4), run those layers "
        "on the tokens whose logits are wanted, of a prompt the last. Refused for other models and for backends that plan on "
        "the host; steps that score prompt tokens run all layers on all tokens")
    async_stepping: bool | None = _option(
        None, "take in the results of a step while the next one runs. None: on a GPU only")
    seed: int | None = _option(0, "seed of requests that have none. None: different in every run")

    def __post_init__(self) -> None:
        kinds = _option_types()
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if not _fits(value, kinds[name]):
                raise ValueError(f"{name} must be {_described(kinds[name])}, got {value!r}")
            if isinstance(value, Integral) and not isinstance(value, bool):
                value = int(value)  # numpy's integers overflow
                object.__setattr__(self, name, value)
            least = option.metadata["least"]
            if least is not None and value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}{_WHY.get(name, '')}, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        most = self.max_cudagraph_capture_size
        for name in ("cudagraph_capture_sizes", "cudagraph_token_sizes"):
            listed = getattr(self, name)
            if most is not None and listed and not isinstance(listed, str) and max(listed) > most:
                raise ValueError(f"{name} has {max(listed)}, which is more than max_cudagraph_capture_size={most}; leave one "
                                 "of them out, or make them agree")
        import torch

        from quire.attn_ops.kv_quant import check_kv_scales
        from quire.attn_ops.metadata.layout import get_kv_cache_layout
        from quire.attn_ops.ops.lora_rows import MAX_ADAPTERS

        if self.max_loras is None and self.max_lora_rank is not None:
            raise ValueError(f"max_lora_rank={self.max_lora_rank} is the rank of each of max_loras, which is None; give both")
        if self.max_loras is not None and self.max_loras > MAX_ADAPTERS:
            raise ValueError(f"max_loras must be at most {MAX_ADAPTERS}, which requests can choose among, got {self.max_loras}")
        if self.kv_scales is not None:
            check_kv_scales(self.kv_scales, kv_dtype(self.kv_cache_dtype))
        object.__setattr__(self, "dtype", compute_dtype(self.dtype))
        object.__setattr__(self, "kv_layout", self.kv_layout or get_kv_cache_layout())
        self.compile_options(torch.device("cpu"))  # raises for names that do not exist

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Raises TypeError for a name that is not an option, ValueError as the class does."""
        known = [option.name for option in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"quire.Engine has no option {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**options)

    def compile_options(self, device: torch.device) -> QuireOptions:
        """The options of the passes, with "auto" resolved for ``device``. On a CPU the lowered graph runs op by op. Raises
        ValueError for an unknown compiler, fusion or dtype."""
        from quire.passes.options import QuireOptions

        on_gpu = device.type == "cuda"
        return QuireOptions(
            attention=self.attention, page_size=self.page_size, layout=self.kv_layout, max_model_len=self.max_model_len,
            window_tables=True, kv_sharing_fast_prefill=self.kv_sharing_fast_prefill,
            kv_cache_dtype=kv_dtype(self.kv_cache_dtype), fixed_kv_scale=self.kv_scales is not None,
            compiler=("inductor" if on_gpu else "eager") if self.compiler == "auto" else self.compiler,
            fusions=("all" if on_gpu else "none") if self.fusions == "auto" else self.fusions)


class EngineOptions(TypedDict, total=False):
    """Names and types of the fields of ``EngineConfig``, for type checkers (``**options: Unpack[EngineOptions]``)."""

    attention: str | Mapping[str, str]
    page_size: int
    num_pages: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str | torch.dtype
    kv_scales: float | Mapping[int, tuple[float, float]] | None
    dtype: str | torch.dtype | None
    max_model_len: int | None
    gpu_memory_utilization: float
    kv_layout: Literal["NHD", "HND"] | None
    prefill_chunk_size: int | None
    cudagraph_capture_sizes: Sequence[int] | Policy | None
    cudagraph_token_sizes: Sequence[int] | Policy | None
    max_cudagraph_capture_size: int | None
    cudagraph_lazy: bool
    cudagraph_debug: bool
    cudagraph_piecewise: bool
    compiler: str
    fusions: str | Sequence[str]
    enable_prefix_caching: bool | None
    enable_lora: bool
    max_loras: int | None
    max_lora_rank: int | None
    max_waiting: int | None
    max_logprobs: int
    kv_sharing_fast_prefill: bool
    async_stepping: bool | None
    seed: int | None


@functools.cache
def _option_types() -> dict[str, Any]:
    import torch

    return typing.get_type_hints(EngineConfig, localns={"torch": torch})


def _fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of the annotated type ``kind``."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return value in inner
    if typing.get_origin(kind) is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_fits(item, inner[0]) for item in value)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, (tuple, list)) and len(value) == len(inner) and all(map(_fits, value, inner))
    if typing.get_origin(kind) is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(x, inner[1]) for k, x in value.items())
    if inner:  # a union
        return any(_fits(value, one) for one in inner)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _described(kind: Any) -> str:
    """An annotated type in English: ``int | None`` is "an integer or None"."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, inner))
    if typing.get_origin(kind) is Sequence:
        return "a list of " + {int: "integers", str: "strings"}[inner[0]]
    if typing.get_origin(kind) is Mapping:
        return "a dictionary of strings" if inner[0] is str else "a dictionary of two numbers for each layer"
    if inner:
        return " or ".join(map(_described, inner))
    names = {int: "an integer", float: "a number", str: "a string", bool: "True or False", type(None): "None"}
    return names.get(kind, "a torch dtype")


def kv_dtype(name: str | torch.dtype) -> torch.dtype | None:
    """The dtype of the KV cache; None for "auto". "fp8" and "fp8_e4m3" are float8_e4m3fn, "fp8_e5m2" is float8_e5m2. Raises
    ValueError for an unknown name."""
    import torch

    from quire.attn_ops.kv_quant import ALIASES

    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return None
    dtype = ALIASES.get(name, getattr(torch, name, None)) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"kv_cache_dtype {name!r} is not 'auto', a torch dtype such as 'bfloat16' or 'int8', or one of "
                         f"{', '.join(map(repr, ALIASES))}")
    return dtype


def compute_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of the option ``dtype``. Raises ValueError for a name or dtype that weights cannot be cast to."""
    import torch

    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if name is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2:
        return dtype
    raise ValueError(f"dtype must be None, 'bfloat16', 'float16', 'float32' or 'float64', or such a torch dtype, got {name!r}. "
                     "For smaller weights quantize the model first; the KV cache has kv_cache_dtype")


def option_help(indent: int = 4) -> str:
    """One paragraph per option: its name, help text and default."""
    texts = (f"{option.name}: {option.metadata['help']} (default: {option.default!r})." for option in fields(EngineConfig))
    return "\n".join(textwrap.fill(text, 110, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4))
                     for text in texts)


def documents_options(cls: T) -> T:
    """Class decorator: put the options into the docstring, at ``{options}``, and into the signature, for ``**options``."""
    cls.__doc__ = inspect.cleandoc(cls.__doc__ or "").replace("    {options}", option_help())
    first = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = list(inspect.signature(EngineConfig).parameters.values())
    cls.__signature__ = inspect.Signature([*first, *rest])  # type: ignore[attr-defined]
    return cls


def parse_option(text: str) -> tuple[str, Any]:
    """"key=value" of the command line, the value a Python literal or a bare word. Raises ValueError for other text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{text!r} is not of the form key=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a bare word is a string


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the command line, checked. Raises ValueError for a wrong name or value."""
    try:
        EngineConfig.of(options)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return dict(options)

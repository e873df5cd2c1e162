"""Dynamo's errors as users see them, and what it leaves out of a trace instead of failing."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.expert_lora import unfit
from quire.passes.capture.hf_experts import is_wrapper
from quire.passes.verify.sites import DRAWS

#: What Dynamo's text says of a forward that it cannot trace, and what that means to its author.
_MEANS = {
    r"logging\.Logger|LoggingLogger": "it writes to a log. Remove the logging, or what it warns of",
    r"torch\.jit": "it calls a TorchScript module. Put the Python module in its place",
    r"qualname: disable|marked as skipped|skip_dynamo|in skipfiles": (
        "it calls a function that is kept out of torch.compile (torch.compiler.disable, as in accelerate's hooks for offloaded "
        "weights, or in layers of some PEFT methods). Load the model whole onto one device, remove the hooks, or merge the "
        "adapter"),
    r"GetAttrVariable\(TensorVariable": "it stores a tensor on a module each time. Make it a buffer when the module is made",
    r"specialized it to be a constant": (
        "an operation takes the length of the row as a plain number, which means nothing to the sequences of a packed row. "
        "Compute with position_ids, or with constants"),
    r"'is_causal' must be bool, not SymBool": (
        "it passes a condition on the length as is_causal (such as is_causal=T > 1), which torch.compile does not take. Pass "
        "is_causal=True, which means the same for one token"),
    r"nn\.attention\.bias": (
        "it makes a mask by torch.nn.attention.bias (causal_lower_right, causal_upper_left), which torch.compile does not "
        "take. Pass is_causal=True to F.scaled_dot_product_attention instead"),
    r"backwards? hooks": "backward hooks are registered, for all modules (register_module_full_backward_hook) or on one that "
                         "is no submodule of the model. Remove them",
}


@contextlib.contextmanager
def without_warnings_once() -> Iterator[None]:
    """While inside, Dynamo leaves out transformers' ``logger.warning_once``, which it cannot trace, beside what it leaves out
    already."""
    once = {f for name, f in vars(logging.Logger).items() if name == "warning_once"}
    log = logging.getLogger("torch._dynamo.metrics_context")
    log.addFilter(_is_fault)
    try:
        with torch._dynamo.config.patch(ignore_logger_methods={*torch._dynamo.config.ignore_logger_methods, *once}):
            yield
    finally:
        log.removeFilter(_is_fault)


def _is_fault(record: logging.LogRecord) -> bool:
    """False: PyTorch 2.11 logs an error, with its traceback, where it cannot write that setting as JSON for its metrics."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, TypeError) and "is not JSON serializable" in str(error))


def unwrapped(error: Exception, model: Any, by_itself: Callable[[], Any] | None = None) -> Exception:
    """Our own error from inside Dynamo's, or one that names the model; ``by_itself`` runs its own forward, for its errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedAttention):
            return UnsupportedAttention(str(cause))
        inner = getattr(cause, "inner_exception", None)
        cause = inner or cause.__cause__ or cause.__context__
    ours = re.search(r"UnsupportedAttention\((.*)\)$", str(error), re.MULTILINE)
    if ours is not None:  # an exception raised while tracing reaches us in Dynamo's text
        plain = re.search(r"ConstantVariable\(str: (['\"])(.*)\1\)", ours[1])  # as torch 2.11 shows it
        return UnsupportedAttention(plain[2] if plain else ours[1].strip("'\""))
    error = getattr(error, "inner_exception", None) or error  # not Dynamo's line, which prints the whole backend
    text, name = str(error), type(model).__name__
    raised = re.search(r"raised exception (\w+)\(\[?(?:ConstantVariable\(str: )?(['\"])(.*?)\2\)", text)
    if raised is not None:
        return UnsupportedAttention(
            f"{name}'s forward raises {raised[1]} when it is given token ids and positions alone: {raised[3]}")
    line = _last_line(text)
    if re.search(r"qualname: Random\.|\brandom_value_\d", text) or re.search(r"(?<!torch\.)\brandom\.\w+\(", line):
        return UnsupportedAttention(f"{DRAWS}{_reason(text, DRAWS)}")
    if re.search(r"\b(if|and|or|not) logits_to_keep\b|-logits_to_keep *:", line):
        return UnsupportedAttention(
            f"{name}'s forward takes logits_to_keep for a number, and quire gives a tensor, as transformers may: which "
            f"tokens' logits are wanted{_reason(text)}. Select by it, hidden[:, logits_to_keep], or drop the parameter.")
    if re.search(r"[Dd]ata-dependent|Dynamic shape operator|Tensor\.item|GuardOnDataDependent", text):
        experts = _has_experts(model)
        return UnsupportedAttention(
            f"{name}'s forward reads values of tensors on the host, as "
            f"{'a Python loop over the experts in use or ' if experts else ''}a branch on data does, so that its path depends "
            f"on the batch and cannot be one graph{_reason(text)}. Compute all paths by tensor operations"
            + (", or pass experts through transformers' experts interface." if experts else "."))
    fails = re.search(r"got (\w+)\((['\"])(.*?)\2\)", text)
    if type(error).__name__ == "TorchRuntimeError" and fails is not None:
        return UnsupportedAttention(
            f"{name}'s forward fails on one row of token ids, as a ragged batch is given to it: {fails[1]}: {fails[3]}"
            f"{_reason(text)}. It must take token ids of shape (1, tokens), and such position_ids if any.")
    means = next((meaning for sign, meaning in _MEANS.items() if re.search(sign, text)), None)
    try:
        _ = by_itself() if means is None and by_itself is not None else None
    except Exception as own:
        said = str(own).strip().partition("\n")[0]
        return UnsupportedAttention(f"{name}'s own forward fails on token ids and positions: {type(own).__name__}: "
                                    f"{said[:200]}. It must run on these before it can be traced")
    first = text.strip().splitlines()[0] if text.strip() else ""
    hint = _adapters_hint(model) if isinstance(model, torch.nn.Module) else ""
    if means is None and hint and isinstance(model, torch.nn.Module) and _unfit_wrappers(model):
        return UnsupportedAttention(f"{name} could not be traced into one graph{hint}")  # Dynamo's text says nothing more
    if means is None:
        met = type(error).__name__
        means = f"torch.compile does not support this: {first}" if met == "Unsupported" else f"{met}: {first}"
    return UnsupportedAttention(f"{name} could not be traced into one graph: {means}{_reason(text, means)}{hint}")


def _has_experts(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and any(
        re.search(r"expert|moe|mixture", f"{path} {type(m).__name__}", re.IGNORECASE) for path, m in model.named_modules())


def _adapters_hint(model: torch.nn.Module) -> str:
    """What may be the matter with PEFT's layers in the model; empty if it has none."""
    found = [m for m in model.modules() if type(m).__module__.startswith("peft.")]
    if not found:
        return ""
    if unknown := _unfit_wrappers(model):
        path, why = next(iter(unknown.items()))
        return (f". {path} {why} (PEFT's target_parameters, which target_modules=\"all-linear\" includes for experts and "
                'routers), and Dynamo cannot trace PEFT\'s code for that: name the linear layers (target_modules=["q_proj", '
                '"v_proj", ...]), or merge the adapter with merge_adapter()')
    kinds = ", ".join(sorted({type(m).__name__ for m in found}))
    return (f". It has PEFT layers ({kinds}), some of which Dynamo cannot trace (DoRA of embeddings or quantized weights, "
            "trainable tokens): merge the adapter with merge_adapter(), or disable it")


def _unfit_wrappers(model: torch.nn.Module) -> dict[str, str]:
    """The modules, by path, whose parameters are adapted in a way that quire does not trace, and why."""
    found = ((path, unfit(m)) for path, m in model.named_modules() if is_wrapper(m))
    return {path: why for path, why in found if why is not None}


def is_first_read(error: Exception) -> bool:
    """Whether Dynamo met a lock that a first call of the model takes, and cannot trace: of a ``functools.cached_property`` that
    was never read (Python 3.11), or of the hooks that transformers installs for hidden states, attentions or router logits."""
    text = str(error)
    return ("RLock" in text and "SETUP_WITH" in text) or ("_WITH" in text and "output_capturing" in text)


def _reason(text: str, means: str = "") -> str:
    """The useful part of Dynamo's further lines: what it met, unless ``means`` says it, and the place in the user's code."""
    context = r"Developer debug context: *(?!attempted to jump)(\S.*)"
    met = None if means in (DRAWS, *_MEANS.values()) else re.search(context, text)
    places = [re.sub(r'"[^"]*[/\\]site-packages[/\\]', '"', place)
              for place in re.findall(r'^ *(File ".*", line \d+)', text.partition("from user code")[2], re.MULTILINE)]
    places = [place for place in places if not place.startswith('File "torch')] or places
    found = [part for part in (met and met[1].strip()[:200], places and places[-1][-90:]) if part]
    return f" ({'; '.join(found)})" if found else ""


def _last_line(text: str) -> str:
    """The line of the user's code at which Dynamo stopped; empty if it does not say."""
    lines = re.findall(r'^ *File ".*", line \d+.*\n *(.*)', text.partition("from user code")[2], re.MULTILINE)
    return lines[-1] if lines else ""

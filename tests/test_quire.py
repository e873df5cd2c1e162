"""The front door: every public name."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import quire


def test_names() -> None:
    assert sorted(quire.__all__) == quire.__all__ == [
        "AttentionBackend", "AttentionCapabilities", "AttentionSite", "BeamSearchOutput", "BeamSearchParams",
        "BeamSearchSequence", "CommonAttentionMetadata", "CompletionOutput", "CudagraphSupport", "Engine", "EngineStats",
        "Logprob", "PagedKVCache", "QueueFull", "RequestOutput", "SamplingParams", "Score", "Step", "StepLimits", "StreamEvent",
        "UnsupportedAttention", "WeightUpdateError", "WeightsGroup", "assert_attention_sites", "backends", "build_tree_mask",
        "check_backend", "cross_attention", "current_step", "define_mla_op", "define_paged_op", "define_state_op",
        "encoder_attention", "explain", "make_draft_metadata", "merge_state", "merge_states", "paged", "register_backend",
        "step", "tree_attention", "tree_positions", "varlen_attention",
    ]
    for name in quire.__all__:
        thing = getattr(quire, name)
        assert inspect.getdoc(thing), f"quire.{name} has no docstring"
    assert issubclass(quire.UnsupportedAttention, ValueError)
    # The imports that type checkers read are those that ``__getattr__`` makes; a bad name lists the good ones.
    tree = ast.parse(Path(quire.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {alias.asname: str(node.module) for node in typed.body if isinstance(node, ast.ImportFrom)
               for alias in node.names}
    assert sorted(imports) == sorted(quire.__all__) and set(quire.__all__) <= set(dir(quire))
    for name, module in imports.items():
        assert getattr(quire, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Motor'; it has AttentionBackend, .*, Engine"):
        quire.Motor  # noqa: B018


def test_importing_is_enough_and_loads_no_gpu() -> None:
    """In a process of its own: no transformers before an engine is asked for, no CUDA, no warning."""
    code = ("import sys, warnings; warnings.simplefilter('error', FutureWarning)\n"
            "import quire, torch\n"
            "assert quire.PagedKVCache and quire.backends() and 'transformers' not in sys.modules\n"
            "assert not torch.cuda.is_initialized()\n"
            "assert quire.PagedKVCache.for_model and torch.ops.quire.attention\n")
    subprocess.run([sys.executable, "-c", code], check=True)

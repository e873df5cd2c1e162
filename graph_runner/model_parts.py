"""The modules of a model but those that a trace does not read, whatever they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

#: Modules of which only some children count: the names of these, by the ids of the modules.
Apart = Mapping[int, Collection[str]]
#: Attributes of PEFT's LoRA layers that have an entry for each adapter, as the layers' ``lora_A`` has a child.
PER_ADAPTER = frozenset(("r", "lora_alpha", "scaling", "use_dora", "use_rslora", "lora_bias", "lora_variant"))


def children(module: torch.nn.Module, apart: Apart | None) -> list[tuple[str, torch.nn.Module | None]]:
    """Those that count, in their order, with their names."""
    counted = None if apart is None else apart.get(id(module))
    found = module._modules.items()
    return list(found) if counted is None else [(name, child) for name, child in found if name in counted]


def entries(module: torch.nn.Module, name: str, value: Any, apart: Apart | None) -> Any:
    """An attribute of the module; of one of ``PER_ADAPTER`` the entries of the adapters that count."""
    counted = None if apart is None or name not in PER_ADAPTER else apart.get(id(module._modules.get("lora_A")))
    return {k: v for k, v in value.items() if k in counted} if counted is not None and type(value) is dict else value


def named_parts(model: torch.nn.Module, apart: Apart | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """As ``model.named_modules()``, of the parts that count."""
    if apart is None:
        yield from model.named_modules()
        return
    waiting, seen = [("", model)], set[torch.nn.Module]()
    while waiting:
        path, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        waiting += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children(module, apart))
                    if child is not None]

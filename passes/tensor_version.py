"""The version counters that PyTorch has for changes of tensors in place.

Tensors made under ``torch.inference_mode()`` have none. ``p.data = ...``, as in ``model.to(dtype)``, may give such a parameter
memory of an ordinary tensor: then ``p.is_inference()`` is False, there is still no counter, and still only code in that mode
may write it.
"""

from __future__ import annotations

import torch


def has_version(tensor: torch.Tensor) -> bool:
    """Whether PyTorch counts the changes in place of ``tensor``. If not, only code in inference mode may make any."""
    try:
        return not tensor.is_inference() and tensor._version is not None
    except RuntimeError:  # made in inference mode, with other memory now
        return False


def version_of(tensor: torch.Tensor) -> int:
    """The version of ``tensor``; 0 where PyTorch keeps none."""
    try:
        return 0 if tensor.is_inference() else tensor._version
    except RuntimeError:
        return 0

"""Images and videos of a batch, and the positions in time, height and width that their tokens have (mrope: Qwen2-VL, Qwen3-VL).

For engine builders, as a part of ``ForwardBatch``: quire's own engine serves text, whose three positions are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch


class MultimodalItem(NamedTuple):
    """Consecutive tokens of a prompt that stand for one image, one video or one piece of audio.

    Args:
        modality: what they are.
        offset: the first of them in the prompt.
        num_tokens: how many.
        grid_thw: patches in time, height and width, before merging, of an image or video; None: their positions are a text's.
            Models that write a time before each frame (Qwen3-VL) have one item for each frame, with a time of 1.
    """

    modality: Literal["image", "video", "audio"]
    offset: int
    num_tokens: int
    grid_thw: tuple[int, int, int] | None = None


@dataclass
class MultimodalInputs:
    """Inputs of one prompt, or of several (``merge``), other than text: ``items`` in the order of the prompt;
    ``mrope_positions``, (3, L) int64, host: positions of the prompt's tokens in time, height and width, None without mrope;
    ``mrope_position_delta``, (prompts,) int64, host: what positions after the prompt are ahead of token positions."""

    items: list[MultimodalItem] = field(default_factory=list)
    mrope_positions: torch.Tensor | None = None
    mrope_position_delta: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    @classmethod
    def of(cls, num_tokens: int, items: Iterable[MultimodalItem], *, spatial_merge_size: int = 2, time_interval: float = 1.0
           ) -> MultimodalInputs:
        """Inputs of a prompt of ``num_tokens`` tokens, with positions; ``mrope_positions`` has the arguments and errors."""
        ordered = sorted(items, key=lambda item: item.offset)
        positions = mrope_positions(num_tokens, ordered, spatial_merge_size=spatial_merge_size, time_interval=time_interval)
        return cls(ordered, positions, positions.amax().add(1 - num_tokens).reshape(1))

    @classmethod
    def merge(cls, inputs: Sequence[MultimodalInputs]) -> MultimodalInputs:
        """Inputs of several prompts, one after the other: items keep their offsets within their own prompt. Positions are
        joined if all have them."""
        given = [one.mrope_positions for one in inputs if one.mrope_positions is not None]
        return cls([item for one in inputs for item in one.items],
                   torch.cat(given, dim=1) if given and len(given) == len(inputs) else None,
                   torch.cat([one.mrope_position_delta for one in inputs]))

    def contains(self, modality: str) -> bool:
        return any(item.modality == modality for item in self.items)


def mrope_positions(num_tokens: int, items: Sequence[MultimodalItem], *, spatial_merge_size: int = 2,
                    time_interval: float = 1.0) -> torch.Tensor:
    """(3, num_tokens) int64: positions in time, height and width, as transformers' ``get_rope_index`` has them.

    Text counts on from where it is, the same in all three. The tokens of an image begin there too, and count frames, rows and
    columns of patches after merging; text behind it goes on after the longer side. (For a video with more frames than rows and
    columns, text goes on before the last frame's time: so transformers computes it, and models are run.)

    ``items``: in order, not overlapping. ``spatial_merge_size``: patches per token, in height and in width. ``time_interval``:
    positions per frame. Raises ValueError for an item outside the prompt or over another one, or with another number of tokens
    than its grid."""
    parts: list[torch.Tensor] = []
    token = position = 0

    def text(count: int) -> None:
        nonlocal token, position
        parts.append(torch.arange(position, position + count).expand(3, -1))
        token, position = token + count, position + count

    for item in items:
        if not token <= item.offset <= item.offset + item.num_tokens <= num_tokens:
            raise ValueError(f"{item} lies outside a prompt of {num_tokens} tokens, or over the item before it, which ends at "
                             f"{token}")
        text(item.offset - token)
        if item.grid_thw is None:
            text(item.num_tokens)
            continue
        frames, rows, columns = item.grid_thw[0], *(n // spatial_merge_size for n in item.grid_thw[1:])
        if frames * rows * columns != item.num_tokens:
            raise ValueError(f"{item} has a grid of {frames} x {rows} x {columns} tokens (spatial_merge_size="
                             f"{spatial_merge_size}), {frames * rows * columns} in all")
        grid = torch.meshgrid((torch.arange(frames) * time_interval).long(), torch.arange(rows), torch.arange(columns),
                              indexing="ij")
        parts.append(torch.stack(grid).reshape(3, -1) + position)
        token, position = token + item.num_tokens, position + max(rows, columns)
    text(num_tokens - token)
    return torch.cat(parts, dim=1)

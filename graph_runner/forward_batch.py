"""``ForwardBatch``: one step's batch, in SGLang's names.

The engine's step buffers give each step as one (``StepBuffers.forward_batch``), over the staged inputs at their fixed
addresses; the runner reads ids, positions, mode and metadata from it. ``ForwardBatch.of`` makes one of any metadata, for
builders of other engines. Neither copies anything or waits for the device. Beside it, for engines on several ranks: padding
for MLPs that all ranks run together, the halves of a batch for two-batch overlap, the tensors between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch

from quire.attn_ops.metadata import CommonAttentionMetadata, UBatchSlice, create_ubatch_slices
from quire.attn_ops.metadata.prefix_chunks import MAX_CHUNK_CAPACITY, PrefixChunks
from quire.graph_runner.forward_mode import CaptureHiddenMode, ForwardMode
from quire.graph_runner.multimodal import MultimodalInputs


def _contains(modality: str) -> Callable[[ForwardBatch], bool]:
    """A method: whether a sequence has an input of this kind."""
    return lambda batch: any(one is not None and one.contains(modality) for one in batch.mm_inputs)


def _of_metadata(name: str) -> Any:
    """A property: what the metadata have under another name."""
    return property(lambda batch: getattr(batch.metadata, name))


@dataclass
class ForwardBatch:
    """A step's batch. T tokens and B sequences, padding included.

    Args:
        forward_mode: see ForwardMode.
        metadata: lengths, block table and slots.
        input_ids, positions: (T,) int64.
        mrope_positions: (3, T) int64 for models with positions in time, height and width; None for the others.
        capture_hidden_mode: hidden states to return.
        prefix_chunks: see ``prepare_chunked_prefix_cache_info``.  prefix_chunk_idx: the chunk at work.
        attn_attend_prefix_cache: True: attend to that chunk; False: to the new tokens; None: to all at once.
        window_metadata: as ``metadata``, with slots and block table of layers with a window, where those have pages of their
            own (``window_pages.py``); else None.
        token_source: (T,) int64: the slot whose newest token is the token's id, -1 where ``input_ids`` has it; None: nowhere.
        logits_indices: (B,) int64: each row's last token, 0 for padding rows.
        mm_inputs: per sequence what it has beside text, or None; () where nothing has.
        inputs: all staged inputs of the engine's step by name (``step_buffers.py``), these and the sampling parameters of rows.
        dp_padding_mode, global_num_tokens: of a batch that was padded for other ranks (``prepare_mlp_sync_batch``).
    """

    forward_mode: ForwardMode
    metadata: CommonAttentionMetadata
    input_ids: torch.Tensor
    positions: torch.Tensor
    mrope_positions: torch.Tensor | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    prefix_chunks: PrefixChunks | None = None
    prefix_chunk_idx: int = -1
    attn_attend_prefix_cache: bool | None = None
    window_metadata: CommonAttentionMetadata | None = None
    token_source: torch.Tensor | None = None
    logits_indices: torch.Tensor | None = None
    mm_inputs: Sequence[MultimodalInputs | None] = ()
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dp_padding_mode: DpPaddingMode | None = None
    global_num_tokens: Sequence[int] = ()

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata, input_ids: torch.Tensor, positions: torch.Tensor | None = None, *,
           rope_deltas: torch.Tensor | None = None, mm_inputs: Sequence[MultimodalInputs | None] | None = None,
           capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
           ) -> ForwardBatch:
        """The batch of a step's metadata, with their positions (T,) by default. For models with mrope ``rope_deltas``, (B,)
        int64 per sequence: what its text positions are ahead of its token positions (0 for a text without images); or
        ``mm_inputs`` (B,): the images of each sequence, with positions for mrope, or None for a text. Raises ValueError for
        token ids or positions that are not one per token, and images not one entry per sequence, or without positions."""
        positions = metadata.positions if positions is None else positions
        for name, tensor in (("input_ids", input_ids), ("positions", positions)):
            if tensor.shape != (metadata.num_tokens,):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the batch has {metadata.num_tokens} tokens")
        lens = np.diff(metadata.query_start_loc_cpu.numpy())
        made = cls(ForwardMode.of(int((lens == 1).sum()), int((lens > 0).sum())), metadata, input_ids, positions,
                   capture_hidden_mode=capture_hidden_mode, logits_indices=metadata.logits_indices)
        if mm_inputs is not None:
            if len(mm_inputs) != metadata.num_reqs:
                raise ValueError(f"mm_inputs has {len(mm_inputs)} entries for {metadata.num_reqs} sequences; a text has None")
            made.mm_inputs = mm_inputs
            made.mrope_positions = made._image_mrope_positions()
        elif rope_deltas is not None:
            made.mrope_positions = made.text_mrope_positions(rope_deltas)
        return made

    def token_ids(self, newest: torch.Tensor) -> torch.Tensor:
        """(T,) int64 ids: ``input_ids``, and where a token comes from a slot the newest token (slots,) of that."""
        if self.token_source is None:
            return self.input_ids
        return torch.where(self.token_source >= 0, newest[self.token_source.clamp_min(0)], self.input_ids)

    batch_size, num_token_non_padded = _of_metadata("num_reqs"), _of_metadata("num_actual_tokens")
    seq_lens, seq_lens_cpu = _of_metadata("seq_lens"), _of_metadata("seq_lens_cpu")
    out_cache_loc = _of_metadata("slot_mapping")

    @property
    def seq_lens_sum(self) -> int:
        return int(self.metadata.seq_lens_cpu.sum())

    @property
    def extend_seq_lens(self) -> torch.Tensor:
        return self.metadata.query_start_loc.diff()

    @property
    def extend_prefix_lens(self) -> torch.Tensor:
        return self.seq_lens - self.extend_seq_lens

    @property
    def extend_start_loc(self) -> torch.Tensor:
        return self.metadata.query_start_loc[:-1]

    def text_mrope_positions(self, rope_deltas: torch.Tensor) -> torch.Tensor:
        """(3, T) int64: positions of text tokens, equal in time, height and width, each sequence shifted by its delta. Right
        for decodes and for texts; those of an image's tokens follow from its grid (``multimodal.py``).
        """
        lens = self.metadata.query_start_loc.diff().long()
        actual = self.metadata.num_actual_tokens
        shift = self.positions.new_zeros(self.positions.shape[0])
        shift[:actual] = torch.repeat_interleave(rope_deltas.to(shift)[: lens.shape[0]], lens[: rope_deltas.shape[0]],
                                                 output_size=actual)
        return (self.positions + shift).expand(3, -1)

    def _image_mrope_positions(self) -> torch.Tensor:
        """(3, T) int64: in a prompt, the positions that ``mm_inputs`` has for its tokens; behind it, those of a text."""
        if any(one is not None and one.mrope_positions is None for one in self.mm_inputs):
            raise ValueError("mm_inputs without mrope_positions: make them with MultimodalInputs.of")
        deltas = [0 if one is None else int(one.mrope_position_delta) for one in self.mm_inputs]
        found = self.text_mrope_positions(torch.tensor(deltas, dtype=torch.int64)).clone()
        starts, computed = self.metadata.query_start_loc_cpu.tolist(), self.metadata.num_computed_tokens_cpu.tolist()
        for i, one in enumerate(self.mm_inputs):
            if one is not None and one.mrope_positions is not None:
                part = one.mrope_positions[:, computed[i] : computed[i] + starts[i + 1] - starts[i]]
                found[:, starts[i] : starts[i] + part.shape[1]] = part.to(found.device, non_blocking=True)
        return found

    # -- images, video, audio ---------------------------------------------------------------------------------------

    def merge_mm_inputs(self) -> MultimodalInputs | None:
        """What all sequences have beside text, in one; None if none has any."""
        given = [one for one in self.mm_inputs if one is not None]
        return MultimodalInputs.merge(given) if given else None

    contains_image_inputs = _contains("image")
    contains_video_inputs = _contains("video")
    contains_audio_inputs = _contains("audio")

    def contains_mm_inputs(self) -> bool:
        return any(one is not None and one.items for one in self.mm_inputs)

    # -- chunked prefixes -------------------------------------------------------------------------------------------

    def prepare_chunked_prefix_cache_info(self, capacity: int = MAX_CHUNK_CAPACITY) -> None:
        """Cut the prefixes of the batch into chunks of at most ``capacity`` tokens."""
        prefix = self.metadata.num_computed_tokens_cpu.numpy()[: self.batch_size]
        self.prefix_chunks = PrefixChunks.build(prefix, self.seq_lens.device, capacity)

    def set_prefix_chunk_idx(self, idx: int) -> None:
        """Work on this chunk. Raises ValueError if there is none of that number."""
        chunks = 0 if self.prefix_chunks is None else self.prefix_chunks.num_chunks
        if not 0 <= idx < chunks:
            raise ValueError(f"there is no prefix chunk {idx}; the batch has {chunks}")
        self.prefix_chunk_idx = idx

    def set_attn_attend_prefix_cache(self, attn_attend_prefix_cache: bool | None) -> None:
        self.attn_attend_prefix_cache = attn_attend_prefix_cache

    # -- data-parallel ranks ----------------------------------------------------------------------------------------

    def prepare_mlp_sync_batch(self, global_num_tokens: Sequence[int], rank: int, *, attn_tp_size: int = 1,
                               in_graph: bool = False, extends: bool = False) -> ForwardBatch:
        """This rank's batch, padded for MLPs that all data-parallel ranks run together. For engines of several ranks.

        Padding tokens write no slot and are cut from results by ``post_forward_mlp_sync_batch``. Batches of decodes, and idle
        ones, get as many rows as tokens, for a decode graph, unless ``extends``: some rank has a prompt in its batch, and
        decodes are then an EXTEND, of one token each. ``global_num_tokens``: of each rank's batch, before padding, or
        ValueError is raised. ``attn_tp_size``, ``in_graph``: see ``mlp_sync_padding``."""
        if not 0 <= rank < len(global_num_tokens) or global_num_tokens[rank] != self.metadata.num_tokens:
            raise ValueError(f"rank {rank} has a batch of {self.metadata.num_tokens} tokens, which global_num_tokens "
                             f"{list(global_num_tokens)} does not say")
        mode, sizes = mlp_sync_padding(global_num_tokens, attn_tp_size, in_graph)
        rows, tokens = self.seq_lens.shape[0], sizes[rank]
        uniform = self.forward_mode.is_decode_or_idle() and not extends
        more_rows, more = max(tokens - rows, 0) if uniform else 0, tokens - self.metadata.num_tokens

        def pad(tensor: torch.Tensor | None, count: int, value: int = 0) -> Any:
            return None if tensor is None else torch.nn.functional.pad(tensor, (0, count), value=value)

        windows = self.window_metadata
        return replace(
            self, forward_mode=ForwardMode.EXTEND if extends and self.forward_mode.is_decode() else self.forward_mode,
            metadata=self.metadata.padded(tokens, rows + more_rows), input_ids=pad(self.input_ids, more),
            positions=pad(self.positions, more), mrope_positions=pad(self.mrope_positions, more),
            window_metadata=None if windows is None else windows.padded(tokens, rows + more_rows),
            token_source=pad(self.token_source, more, -1), logits_indices=pad(self.logits_indices, more_rows),
            dp_padding_mode=mode, global_num_tokens=sizes)

    def post_forward_mlp_sync_batch(self, per_row: torch.Tensor | None, per_token: torch.Tensor | None = None
                                    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Results of a padded batch, such as logits of rows and hidden states of tokens, without those of padding."""
        meta = self.metadata
        return (None if per_row is None else per_row[: meta.num_reqs],
                None if per_token is None else per_token[: meta.num_actual_tokens])

    # -- two-batch overlap ------------------------------------------------------------------------------------------

    def two_batch_slices(self, threshold: float = 0.5) -> list[UBatchSlice] | None:
        """The two halves that may overlap, or None for a batch that has no two; see ``two_batch_split``."""
        start = self.metadata.query_start_loc_cpu[: self.batch_size + 1]
        split = two_batch_split(np.diff(start.numpy()), threshold)
        return None if split is None else create_ubatch_slices(start, [split])

    @property
    def can_run_tbo(self) -> bool:
        return self.two_batch_slices() is not None


def two_batch_split(query_lens: Sequence[int] | np.ndarray, threshold: float = 0.5) -> int | None:
    """The token at which a batch is cut in two: between sequences, where the tokens balance best; inside one, at half of all
    tokens, if the smaller part would otherwise have less than ``threshold`` of the larger. None: fewer than two tokens."""
    ends = np.cumsum(np.asarray(query_lens, dtype=np.int64))
    total = int(ends[-1]) if ends.size else 0
    if total < 2:
        return None
    borders = ends[(ends > 0) & (ends < total)]
    if borders.size:
        best = int(borders[np.abs(2 * borders - total).argmin()])
        if min(best, total - best) >= threshold * max(best, total - best):
            return best
    return total // 2


class DpPaddingMode(Enum):
    """MAX_LEN: every rank pads to the longest; SUM_LEN: the ranks' tokens lie end to end."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"


def mlp_sync_padding(global_num_tokens: Sequence[int], attn_tp_size: int = 1, in_graph: bool = False
                     ) -> tuple[DpPaddingMode, list[int]]:
    """How data-parallel ranks pad their tokens for MLPs that all of them run together, and to how many tokens each.

    Numbers are rounded up to multiples of ``attn_tp_size``. MAX_LEN where that moves less (all-gather of equal parts against
    an all-reduce of the whole, twice its bytes), and always in graphs, whose shapes are fixed.
    ``ForwardBatch.prepare_mlp_sync_batch`` pads a batch so.
    """
    padded = [-(-n // attn_tp_size) * attn_tp_size for n in global_num_tokens]
    if in_graph or 2 * sum(padded) > max(padded) * len(padded):
        return DpPaddingMode.MAX_LEN, [max(padded)] * len(padded)
    return DpPaddingMode.SUM_LEN, padded


@dataclass(eq=False)
class PPProxyTensors:
    """Named tensors that one pipeline stage gives the next. Equal if the names, devices, dtypes and all numbers are."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getitem__(self, key: str | slice) -> Any:
        """A tensor by name, or these rows of every tensor."""
        if isinstance(key, str):
            return self.tensors[key]
        return PPProxyTensors({name: tensor[key] for name, tensor in self.tensors.items()})

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.tensors[key] = value

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PPProxyTensors):
            return NotImplemented
        mine: Mapping[str, torch.Tensor] = self.tensors
        return mine.keys() == other.tensors.keys() and all(
            t.dtype == other.tensors[name].dtype and t.device == other.tensors[name].device
            and torch.equal(t, other.tensors[name]) for name, t in mine.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PPProxyTensors({', '.join(f'{name}: {tuple(t.shape)} {t.dtype}' for name, t in self.tensors.items())})"

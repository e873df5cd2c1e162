"""The batch for other engines: modes, views of the metadata, halves, padding between ranks, tensors between stages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2VLConfig, Qwen2VLModel, Qwen3VLConfig, Qwen3VLModel

from quire.attn_ops.metadata import CommonAttentionMetadata, split_attn_metadata
from quire.graph_runner.forward_batch import DpPaddingMode, ForwardBatch, PPProxyTensors, mlp_sync_padding, two_batch_split
from quire.graph_runner.forward_mode import CaptureHiddenMode, ForwardMode
from quire.graph_runner.multimodal import MultimodalInputs, MultimodalItem

M = ForwardMode


def batch(query_lens, seq_lens, **options) -> ForwardBatch:
    pages = [[1 + 10 * i + j for j in range(10)] for i in range(len(seq_lens))]
    meta = CommonAttentionMetadata.build(query_lens, seq_lens, pages, page_size=4)
    return ForwardBatch.of(meta, torch.arange(sum(query_lens)), **options)


def modes(method) -> set[ForwardMode]:
    return {mode for mode in M if getattr(mode, method)()}


def test_modes() -> None:
    assert modes("is_extend") == modes("is_prefill") == {M.EXTEND, M.MIXED, M.DRAFT_EXTEND, M.TARGET_VERIFY}
    assert modes("is_cuda_graph") == {M.DECODE, M.TARGET_VERIFY, M.IDLE} and modes("is_cpu_graph") == {M.DECODE}
    assert modes("is_decode_or_idle") == {M.DECODE, M.IDLE}
    assert modes("is_extend_or_draft_extend_or_mixed") == {M.EXTEND, M.DRAFT_EXTEND, M.MIXED}
    for mode in (M.DECODE, M.MIXED, M.IDLE, M.TARGET_VERIFY, M.DRAFT_EXTEND, M.SPLIT_PREFILL, M.DUMMY_FIRST):
        assert modes(f"is_{mode.name.lower()}") == {mode}
    assert [M.of(*n) for n in ((2, 2), (0, 2), (1, 2), (0, 0))] == [M.DECODE, M.EXTEND, M.MIXED, M.IDLE]


def test_hidden_modes() -> None:
    null, last, full = CaptureHiddenMode
    assert null < last < full and max(null, full) is full
    assert [m.need_capture() for m in (null, last, full)] == [False, True, True]
    assert last.is_last() and full.is_full() and not full.is_last()


def test_views_of_the_metadata() -> None:
    got = batch([3, 1], [10, 7])
    assert got.forward_mode is M.MIXED and got.batch_size == 2 and got.seq_lens_sum == 17
    assert got.positions.tolist() == [7, 8, 9, 6] and got.out_cache_loc is got.metadata.slot_mapping
    assert got.extend_seq_lens.tolist() == [3, 1] and got.extend_prefix_lens.tolist() == [7, 6]
    assert got.extend_start_loc.tolist() == [0, 3] and got.seq_lens is got.metadata.seq_lens
    assert batch([1, 1], [4, 9]).forward_mode is M.DECODE and got.seq_lens_cpu.tolist() == [10, 7]
    assert batch([1, 0], [4, 9]).forward_mode is M.DECODE and batch([0, 0], [4, 9]).forward_mode is M.IDLE
    padded = got.metadata.padded(8, 4)
    assert ForwardBatch.of(padded, torch.zeros(8, dtype=torch.int64)).forward_mode is M.MIXED
    with pytest.raises(ValueError, match=r"input_ids has shape \(4,\); the batch has 8 tokens"):
        ForwardBatch.of(padded, got.input_ids)


def test_prefix_chunks() -> None:
    got = batch([3, 1], [10, 7])
    with pytest.raises(ValueError, match="there is no prefix chunk 0; the batch has 0"):
        got.set_prefix_chunk_idx(0)
    got.prepare_chunked_prefix_cache_info(capacity=8)
    assert got.prefix_chunks.seq_lens.tolist() == [[4, 4], [3, 2]]
    got.set_prefix_chunk_idx(1)
    got.set_attn_attend_prefix_cache(True)
    assert (got.prefix_chunk_idx, got.attn_attend_prefix_cache) == (1, True)


def test_mrope_positions_of_texts_are_transformers_own() -> None:
    """Prompts, chunks of them, and decodes after an image, whose delta the prompt has left behind."""
    model = image_models()["qwen2_vl"]
    text = torch.tensor([[5, 6, 7, 8, 9, 10]])
    kinds = {"mm_token_type_ids": torch.zeros_like(text)}
    own, delta = model.get_rope_index(text, attention_mask=torch.ones_like(text), **kinds)
    got = batch([6, 2], [6, 6], rope_deltas=torch.cat([delta[0], delta[0]]))
    assert torch.equal(got.mrope_positions[:, :6], own[:, 0]) and torch.equal(got.mrope_positions[:, 6:], own[:, 0, 4:])
    ids = torch.tensor([[5, 32, 30, 30, 30, 30, 33, 6]])  # an image of 4 x 4 patches: 2 x 2 tokens
    kinds = {"mm_token_type_ids": (ids == 30).long()}
    own, delta = model.get_rope_index(ids, image_grid_thw=torch.tensor([[1, 4, 4]]), attention_mask=torch.ones_like(ids),
                                      **kinds)
    assert delta.item() == -2
    decode = batch([1], [9], rope_deltas=delta[0])
    assert decode.mrope_positions.tolist() == [[own.max().item() + 1]] * 3


VISION = dict(depth=1, hidden_size=16, num_heads=2, patch_size=2, spatial_merge_size=2)
TEXT = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1]))


def image_models() -> dict:
    special = dict(image_token_id=30, video_token_id=31, vision_start_token_id=32, vision_end_token_id=33)
    return {"qwen2_vl": Qwen2VLModel(Qwen2VLConfig(text_config=TEXT, vision_config=VISION | dict(embed_dim=16), **special)),
            "qwen3_vl": Qwen3VLModel(Qwen3VLConfig(text_config=TEXT, **special, vision_config=VISION | dict(
                intermediate_size=16, out_hidden_size=16, deepstack_visual_indexes=[0], num_position_embeddings=16)))}


# (token, how many): 30 is an image's token, 31 a video's.
@pytest.mark.parametrize(("runs", "images", "videos"), [
    ([(5, 3), (30, 6), (6, 2)], [(1, 4, 6)], []), ([(30, 4), (6, 1), (30, 8)], [(1, 4, 4), (1, 4, 8)], []),
    ([(5, 2), (31, 12), (6, 3), (30, 2), (7, 1)], [(1, 2, 4)], [(3, 4, 4)]),
    ([(5, 1), (31, 5), (6, 4)], [], [(5, 2, 2)]),  # more frames than rows and columns
])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_mrope_positions_of_images_are_transformers_own(name, runs, images, videos) -> None:
    """Whole prompts, their chunks, and the decodes after them, beside a text in a padded batch."""
    per_frame = name == "qwen3_vl"  # a time is written before each frame
    if per_frame:
        runs = [part for token, n in runs for part in (
            [(5, 1), (31, n // videos[0][0])] * videos[0][0] if token == 31 else [(token, n)])]
    ids = torch.tensor([token for token, n in runs for _ in range(n)])
    own, delta = image_models()[name].get_rope_index(
        ids[None], mm_token_type_ids=((ids == 30) * 1 + (ids == 31) * 2)[None], attention_mask=torch.ones_like(ids)[None],
        image_grid_thw=torch.tensor(images) if images else None, video_grid_thw=torch.tensor(videos) if videos else None)
    grids = {30: iter(images), 31: iter([(1, h, w) for t, h, w in videos for _ in range(t)] if per_frame else videos)}
    items, at = [], 0
    for token, n in runs:
        if token in grids:
            items.append(MultimodalItem("image" if token == 30 else "video", at, n, next(grids[token])))
        at += n
    made = MultimodalInputs.of(len(ids), reversed(items))
    assert torch.equal(made.mrope_positions, own[:, 0]) and torch.equal(made.mrope_position_delta, delta[0])
    length, half = len(ids), len(ids) // 2
    got = batch([half, 2, length - half, 1], [half, 9, length, length + 3], mm_inputs=[made, None, made, made])
    after = int(own.max()) + 3  # the third token behind the prompt
    want = torch.cat([own[:, 0, :half], torch.tensor([[7, 8]]).expand(3, -1), own[:, 0, half:],
                      torch.full((3, 1), after)], 1)
    assert torch.equal(got.mrope_positions, want)
    padded = ForwardBatch.of(got.metadata.padded(length + 9, 6), torch.zeros(length + 9, dtype=torch.int64),
                             mm_inputs=got.mm_inputs)
    assert padded.mrope_positions.shape == (3, length + 9)  # SGLang 0.5.2 pads the other dimension
    assert torch.equal(padded.mrope_positions[:, : length + 3], want) and not padded.mrope_positions[:, length + 3 :].any()


def test_images_of_a_batch() -> None:
    image, sound = MultimodalItem("image", 1, 4, (1, 4, 4)), MultimodalItem("audio", 0, 2)
    seen, heard = MultimodalInputs.of(6, [image]), MultimodalInputs.of(3, [sound])
    assert heard.mrope_positions.tolist() == [[0, 1, 2]] * 3 and heard.mrope_position_delta.tolist() == [0]
    got = batch([6, 2, 3], [6, 2, 3], mm_inputs=[seen, None, heard])
    assert (got.contains_image_inputs(), got.contains_audio_inputs(), got.contains_video_inputs()) == (True, True, False)
    merged = got.merge_mm_inputs()
    assert merged.items == [image, sound] and merged.mrope_position_delta.tolist() == [-2, 0]
    assert merged.mrope_positions.shape == (3, 9)
    text = batch([2], [2], mm_inputs=[None])
    assert text.merge_mm_inputs() is None and not text.contains_mm_inputs() and got.contains_mm_inputs()
    assert batch([2], [2]).merge_mm_inputs() is None
    with pytest.raises(ValueError, match="1 entries for 2 sequences"):
        batch([1, 1], [1, 1], mm_inputs=[None])
    with pytest.raises(ValueError, match="make them with MultimodalInputs.of"):
        batch([1], [1], mm_inputs=[MultimodalInputs([image])])


@pytest.mark.parametrize(("items", "message"), [
    ([MultimodalItem("image", 1, 4, (1, 4, 6))], "has a grid of 1 x 2 x 3 tokens .*, 6 in all"),
    ([MultimodalItem("image", 7, 4, (1, 4, 4))], "lies outside a prompt of 10 tokens"),
    ([MultimodalItem("audio", 1, 4), MultimodalItem("audio", 3, 2)], "over the item before it, which ends at 5"),
])
def test_images_that_do_not_fit(items, message) -> None:
    with pytest.raises(ValueError, match=message):
        MultimodalInputs.of(10, items)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.floats(0, 1))
def test_halves(lens, threshold) -> None:
    """Both have tokens, and together they are the batch; no border between sequences would balance better."""
    split, total = two_batch_split(lens, threshold), sum(lens)
    assert (split is None) == (total < 2)
    if split is not None:
        borders = [sum(lens[:i]) for i in range(len(lens)) if 0 < sum(lens[:i]) < total]
        assert 0 < split < total
        if split in borders:
            assert abs(2 * split - total) == min(abs(2 * b - total) for b in borders)
        else:
            assert split == total // 2 and all(min(b, total - b) < threshold * max(b, total - b) for b in borders)
        got = batch(lens, [n + 3 for n in lens])
        parts = split_attn_metadata(got.two_batch_slices(threshold), got.metadata)
        assert [p.num_actual_tokens for p in parts] == [split, total - split]


def test_halves_of_decodes() -> None:
    assert two_batch_split([1] * 8) == 4 and two_batch_split([100, 1]) == 50 and two_batch_split([1]) is None
    assert not batch([1], [4]).can_run_tbo and batch([1, 1], [4, 5]).can_run_tbo


@pytest.mark.parametrize(("tokens", "tp", "in_graph", "mode", "padded"), [
    ([5, 4], 2, False, DpPaddingMode.MAX_LEN, [6, 6]), ([100, 1, 1, 1], 1, False, DpPaddingMode.SUM_LEN, [100, 1, 1, 1]),
    ([100, 1, 1, 1], 4, True, DpPaddingMode.MAX_LEN, [100] * 4), ([7, 0, 0, 1], 4, False, DpPaddingMode.SUM_LEN, [8, 0, 0, 4]),
])
def test_padding_between_ranks(tokens, tp, in_graph, mode, padded) -> None:
    assert mlp_sync_padding(tokens, tp, in_graph) == (mode, padded)


def test_a_batch_padded_for_other_ranks() -> None:
    """Decodes beside another rank's prompts, or in a graph; padding writes nothing and leaves the results."""
    decodes = batch([1, 1], [4, 9], rope_deltas=torch.tensor([2, 0]))
    got = decodes.prepare_mlp_sync_batch([2, 3], 0, attn_tp_size=2)
    assert (got.forward_mode, got.dp_padding_mode, got.global_num_tokens) == (M.DECODE, DpPaddingMode.MAX_LEN, [4, 4])
    assert got.seq_lens.tolist() == [4, 9, 0, 0] and got.out_cache_loc.tolist()[2:] == [-1, -1] and got.batch_size == 2
    assert got.input_ids.tolist() == [0, 1, 0, 0] and got.positions.tolist() == [3, 8, 0, 0]
    assert got.mrope_positions.tolist() == [[5, 8, 0, 0]] * 3 and got.logits_indices.tolist() == [0, 1, 0, 0]
    logits, hidden = got.post_forward_mlp_sync_batch(torch.arange(4), torch.arange(4))
    assert logits.tolist() == hidden.tolist() == [0, 1] and got.post_forward_mlp_sync_batch(None) == (None, None)
    mixed = decodes.prepare_mlp_sync_batch([2, 7], 0, extends=True)
    assert mixed.forward_mode is M.EXTEND and mixed.seq_lens.tolist() == [4, 9] and len(mixed.input_ids) == 7
    alone = decodes.prepare_mlp_sync_batch([2, 90, 1, 1], 0, extends=True)
    assert alone.dp_padding_mode is DpPaddingMode.SUM_LEN and len(alone.input_ids) == 2
    idle = ForwardBatch.of(CommonAttentionMetadata.build([], [], [], page_size=4), torch.zeros(0, dtype=torch.int64))
    idle = idle.prepare_mlp_sync_batch([2, 0], 1, in_graph=True)
    assert idle.forward_mode is M.IDLE and idle.seq_lens.tolist() == [0, 0] and idle.out_cache_loc.tolist() == [-1, -1]
    assert decodes.input_ids.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"rank 1 has a batch of 2 tokens, which global_num_tokens \[2, 3\] does not say"):
        decodes.prepare_mlp_sync_batch([2, 3], 1)


def test_tensors_between_stages() -> None:
    """SGLang's equality asks for the truth of a tensor; ours compares numbers."""
    a = PPProxyTensors({"hidden": torch.arange(6.0).view(3, 2), "residual": torch.ones(3)})
    same = PPProxyTensors({name: t.clone() for name, t in a.tensors.items()})
    assert a == same and len(a) == 2 and list(a) == ["hidden", "residual"] and a != {"hidden": 1}
    assert a[1:]["hidden"].tolist() == [[2, 3], [4, 5]] and torch.equal(a["residual"], torch.ones(3))
    same["residual"] = torch.zeros(3)
    assert a != same and a != a[:2] and a != PPProxyTensors({"hidden": a["hidden"]})
    assert PPProxyTensors({"x": torch.ones(2)}) != PPProxyTensors({"x": torch.ones(2, dtype=torch.int64)})
    assert repr(a) == "PPProxyTensors(hidden: (3, 2) torch.float32, residual: (3,) torch.float32)"

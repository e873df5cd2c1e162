"""An engine in another dtype than its model's: rollouts of the weights as they are now, never of older ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import quire
from quire.graph_runner.cast_weights import CastWeights
from tests.tiny import assert_unchanged, small_llama, snapshot

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

PROMPTS = [[5, 6, 7, 8], [9, 10]]
OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=4, max_model_len=64, cudagraph_capture_sizes=[])
PARAMS = quire.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


def rollouts(engine: quire.Engine) -> list[Any]:
    return [(o.token_ids, [next(iter(of.values())).logprob for of in o.logprobs or ()])
            for o in engine.generate(PROMPTS, PARAMS)]


class Pair:
    """A float32 model with rollouts in bfloat16, and what they must be: those of the model cast as a whole, but for the buffers
    that are in no checkpoint."""

    def __init__(self) -> None:
        self.model = small_llama(std=0.3)
        self.engine = quire.Engine(self.model, dtype=torch.bfloat16, **OPTIONS)
        self.cast = copy.deepcopy(self.model).to(torch.bfloat16)
        self.cast.model.rotary_emb.inv_freq = self.model.model.rotary_emb.inv_freq.clone()
        self.reference = quire.Engine(self.cast, **OPTIONS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)

    def follow(self) -> None:
        self.cast.load_state_dict(copy.deepcopy(self.model).to(torch.bfloat16).state_dict())

    def optimize(self) -> None:
        """As the Trainer of transformers does by default; the version counters stay as they are."""
        torch.manual_seed(1)
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()

    def replace(self) -> None:
        self.model.model.norm.weight = torch.nn.Parameter(torch.full((32,), 1.7))


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    made.engine.close()
    made.reference.close()


def test_rollouts_are_those_of_the_cast_model(pair) -> None:
    before = snapshot(pair.model)
    seen = [rollouts(pair.engine)]
    assert seen[0] == rollouts(pair.reference)
    assert_unchanged(pair.model, before)
    changes = {
        "a fused optimizer": pair.optimize, "in place": lambda: [p.detach().mul_(1.1) for p in pair.model.parameters()],
        "where PyTorch counts nothing": lambda: [p.data.mul_(0.8) for p in pair.model.parameters()],
        "other memory": lambda: setattr(pair.model.lm_head.weight, "data", pair.model.lm_head.weight.data.flip(0)),
        "a buffer": lambda: pair.model.model.rotary_emb.inv_freq.mul_(0.5),
        "new weights": lambda: pair.engine.update_weights_from_tensors({"model.norm.weight": torch.linspace(-1, 1, 32)}),
        "another parameter": pair.replace,
    }
    for how, change in changes.items():
        change()
        pair.cast.model.rotary_emb.inv_freq.copy_(pair.model.model.rotary_emb.inv_freq)  # not in the state_dict
        pair.follow()
        seen.append(rollouts(pair.engine))
        assert seen[-1] == rollouts(pair.reference), how
        assert seen[-1] != seen[-2], how
    assert {p.dtype for p in pair.model.parameters()} == {torch.float32}


def test_an_optimizer_steps_while_requests_run(pair) -> None:
    """The tokens after it are of the new weights: the counters say nothing about a fused optimizer."""
    streams = [engine.stream(PROMPTS[0], PARAMS) for engine in (pair.engine, pair.reference)]
    got = [[], []]
    for number in range(PARAMS.max_tokens):
        if number == 2:
            pair.optimize()
            pair.follow()
        for tokens, stream in zip(got, streams, strict=True):
            event = next(stream)
            tokens += [(event.token_ids, event.output.logprobs[-1])]
    assert got[0] == got[1]


def test_no_copy_where_the_dtype_is_that_of_the_model(pair) -> None:
    def bytes_of(model: Any) -> int:
        return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))

    assert pair.reference.stats().weight_bytes == bytes_of(pair.cast)
    copies = sum(p.nbytes for p in pair.cast.parameters())
    assert pair.engine.stats().weight_bytes == bytes_of(pair.model) + copies
    mixed = small_llama().to(torch.bfloat16)
    mixed.model.norm.float()
    with quire.Engine(mixed, dtype="bfloat16", **OPTIONS) as engine:
        assert engine.stats().weight_bytes == bytes_of(mixed) + 32 * 2
    loaded = small_llama().to(torch.bfloat16)
    loaded.model.rotary_emb.inv_freq = loaded.model.rotary_emb.inv_freq.float()  # as from_pretrained leaves it
    with quire.Engine(loaded, dtype="bfloat16", **OPTIONS) as engine:
        assert engine.stats().weight_bytes == bytes_of(loaded)


def test_attributes_that_a_parameter_has() -> None:
    """A forward that asks for them would be traced as one of a model without."""
    model = small_llama()
    weight = model.model.norm.weight
    weight.gain = 3.0
    with torch.no_grad():
        weight.copy_(torch.linspace(-1, 1, len(weight)))
    model.model.norm.register_forward_hook(lambda module, args, out: out + getattr(module.weight, "gain", 0.0) * module.weight)
    reference = copy.deepcopy(model).to(torch.bfloat16)
    reference.model.norm.weight.gain = 3.0
    with quire.Engine(model, dtype=torch.bfloat16, **OPTIONS) as cast, quire.Engine(reference, **OPTIONS) as plain:
        for gain in (3.0, -5.0):
            weight.gain = reference.model.norm.weight.gain = gain
            assert rollouts(cast) == rollouts(plain)


def test_what_cannot_be_cast() -> None:
    with pytest.raises(ValueError, match="dtype must be None, 'bfloat16'.*got 'int8'. For smaller weights quantize"):
        quire.Engine(small_llama(), dtype="int8")
    model = small_llama()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(quire.UnsupportedAttention, match="lm_head.weight is quantized.*float8_e4m3fn.*leave dtype out"):
        quire.Engine(model, dtype=torch.bfloat16, **OPTIONS)


def test_a_kept_prefix_is_of_the_weights_before_the_step() -> None:
    """Without the copies too: a fused optimizer must empty the prefix cache."""
    model = small_llama(std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    with quire.Engine(model, page_size=2, enable_prefix_caching=True, **OPTIONS) as engine:
        rollouts(engine)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1).sub_(p)
        optimizer.step()
        got = rollouts(engine)
    with quire.Engine(model, page_size=2, enable_prefix_caching=False, **OPTIONS) as engine:
        assert got == rollouts(engine)


def test_a_path_is_loaded_in_that_dtype(tmp_path) -> None:
    """Without a second set of weights."""
    small_llama().save_pretrained(tmp_path)
    with quire.Engine(str(tmp_path), dtype="bfloat16", **OPTIONS) as engine:
        assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
        assert engine.stats().weight_bytes < 1.1 * sum(p.nbytes for p in engine.model.parameters())
        assert len(engine.generate(PROMPTS, PARAMS)) == 2


def test_weights_that_transformers_keeps_in_float32(tmp_path) -> None:
    """The biases by which DeepSeek chooses experts: close together and far from 0, in bfloat16 many of them are equal."""
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=0,
        q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, max_position_embeddings=64)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval()
    bias = model.model.layers[0].mlp.gate.e_score_correction_bias
    bias.copy_(20 + 0.01 * torch.randperm(8))
    weights = CastWeights(model, torch.bfloat16)
    assert id(bias) not in weights.stand_ins and id(model.lm_head.weight) in weights.stand_ins
    model.save_pretrained(tmp_path)
    loaded = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with weights.in_place():
        assert {n: t.dtype for n, t in model.state_dict().items()} == {n: t.dtype for n, t in loaded.state_dict().items()}

"""Weight updates of a serving engine: all of the new weights, or all of the old ones, and never a mixture."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import quire
from quire.graph_runner.checkpoint import files_of, read_checkpoint, save_checkpoint
from quire.graph_runner.weights import WeightSpec, check_specs, missing_names, write
from tests.tiny import hf_greedy, load_model, load_tokenizer, tokens

IDS = [[5, 17, 26, 3, 29], [9, 9, 21]]
GREEDY = quire.SamplingParams(temperature=0, max_tokens=8)
NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


def other_weights(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that give other tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {name: p.detach() * (1 + 0.5 * torch.randn(p.shape, generator=generator)) for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def engine() -> Iterator[quire.Engine]:
    with quire.Engine(load_model(num_layers=1), load_tokenizer(), num_pages=64, max_num_seqs=4, max_model_len=128,
                      fusions="all") as made:
        yield made


def serves_what_the_model_says(engine: quire.Engine) -> list[list[int]]:
    got = tokens(engine.generate(IDS, GREEDY))
    reference = AutoModelForCausalLM.from_config(engine.model.config).eval()
    reference.load_state_dict(engine.model.state_dict())
    assert got == [hf_greedy(reference, ids, GREEDY.max_tokens) for ids in IDS]
    return got


def snapshot(engine: quire.Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def assert_old(engine: quire.Engine, before: dict[str, torch.Tensor], said: list[list[int]]) -> None:
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    assert tokens(engine.generate(IDS, GREEDY)) == said


@contextlib.contextmanager
def refused(engine: quire.Engine, kind: type[Exception], message: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An update that raises ``kind`` and leaves all weights, and the tokens, as they were."""
    before, said = snapshot(engine), tokens(engine.generate(IDS, GREEDY))
    with pytest.raises(kind, match=message) as error:
        yield error
    assert_old(engine, before, said)


def test_from_tensors(engine) -> None:
    """Nothing is traced or captured again, with fused parameters too."""
    runner, said = engine.runner, serves_what_the_model_says(engine)
    places = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    new = other_weights(engine.model)
    engine.update_weights_from_tensors(new)
    assert serves_what_the_model_says(engine) != said
    assert engine.runner is runner and places == {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    assert all(torch.equal(engine.get_weights_by_name(name), value) for name, value in new.items())
    assert torch.equal(engine.get_weights_by_name(UP, 3), new[UP][:3])
    engine.update_weights_from_tensors([(NORM, torch.ones(len(new[NORM]), dtype=torch.float64))])  # some, and converted
    assert engine.get_weights_by_name(NORM).eq(1).all()
    serves_what_the_model_says(engine)


def in_one_buffer(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    buffer = torch.empty(max(w.numel() for w in weights.values()))
    for name, weight in weights.items():
        yield name, buffer[: weight.numel()].view(weight.shape).copy_(weight)


def freed(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As gathered parts of a sharded model are."""
    for name, weight in weights.items():
        whole = weight.clone()
        yield name, whole
        whole.untyped_storage().resize_(0)


@pytest.mark.parametrize("given", [in_one_buffer, freed])
def test_an_iterator_whose_tensors_do_not_last(engine, given) -> None:
    before, said = snapshot(engine), tokens(engine.generate(IDS, GREEDY))
    with pytest.raises(quire.WeightUpdateError, match="overwritten or freed when another came: give a list, or copies"):
        engine.update_weights_from_tensors(given(other_weights(engine.model)))
    assert_old(engine, before, said)
    engine.update_weights_from_tensors(iter(before.items()))  # each its own memory, and what is tied


def test_running_requests_go_on_with_the_new_weights(engine) -> None:
    """Their next token is what the new model gives for their tokens so far: no key of the old weights is read."""
    [i] = engine.add_request(IDS[0], quire.SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    while len(engine.requests[i].output.token_ids) < 6:
        engine.step()
    output = engine.requests[i].output
    engine.update_weights_from_tensors(other_weights(engine.model, 7))
    before = list(output.token_ids)
    while engine.has_unfinished:
        engine.step()
    assert output.token_ids[: len(before)] == before and len(output.token_ids) == 14
    eos, engine.model.generation_config.eos_token_id = engine.model.generation_config.eos_token_id, None
    assert hf_greedy(engine.model, IDS[0] + before, 14 - len(before)) == output.token_ids[len(before) :]
    engine.model.generation_config.eos_token_id = eos


def test_names_that_are_exchanged_or_given_twice(engine) -> None:
    a, b = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    old = snapshot(engine)
    state = engine.model.state_dict()
    engine.update_weights_from_tensors({a: state[b], b: state[a]})
    assert torch.equal(state[a], old[b]) and torch.equal(state[b], old[a])
    value = engine.get_weights_by_name(NORM)
    with pytest.raises(quire.WeightUpdateError, match="given twice"):
        engine.update_weights_from_tensors([(NORM, value), (NORM, value)])
    with pytest.raises(KeyError, match=r"no parameter 'model.nrm.weight'; near names are model.norm.weight"):
        engine.get_weights_by_name("model.nrm.weight")


@pytest.mark.parametrize(("bad", "message"), [
    ({"model.layers.0.mlp.up_proj.wight": torch.zeros(1)}, "no parameter 'model.layers.0.mlp.up_proj.wight'; near names are"
     " model.layers.0.mlp.up_proj.weight"),
    ({UP: torch.zeros(3, 4)}, f"the parameter '{UP}' has shape .*, its update \\(3, 4\\)"),
    ({NORM: "int"}, f"the parameter '{NORM}' has dtype torch.float32, its update torch.int64"),
    ({NORM: "fp8"}, f"the parameter '{NORM}' has dtype torch.float32, its update torch.float8_e4m3fn: only floating-point"),
])
def test_a_refused_update_changes_nothing(engine, bad, message) -> None:
    before, kinds = snapshot(engine), {"int": torch.int64, "fp8": torch.float8_e4m3fn}
    bad = {name: before[name].to(kinds[v]) if isinstance(v, str) else v for name, v in bad.items()}
    good = other_weights(engine.model, 3)
    for name in bad:
        good.pop(name, None)
    with refused(engine, quire.WeightUpdateError, message) as error:
        engine.update_weights_from_tensors({**good, **bad})
    assert error.value.name in bad and "serves its old weights" in str(error.value)


@pytest.mark.parametrize("value", [[1.0], torch.ones(2, device="meta"), torch.eye(2).to_sparse()])
def test_values_that_are_no_plain_tensors(engine, value) -> None:
    """They would fail while values are copied, after others were written."""
    zeros = torch.zeros_like(engine.get_weights_by_name(UP))
    with refused(engine, quire.WeightUpdateError, f"the update of the parameter '{NORM}' must be a plain tensor, got a"):
        engine.update_weights_from_tensors([(UP, zeros), (NORM, value)])


# Disk.


def test_saved_in_shards_and_loaded_back(engine, tmp_path) -> None:
    engine.update_weights_from_tensors(other_weights(engine.model, 1))
    said, saved = tokens(engine.generate(IDS, GREEDY)), snapshot(engine)
    engine.save_sharded_model(tmp_path, max_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine.update_weights_from_tensors(other_weights(engine.model, 2))
    assert tokens(engine.generate(IDS, GREEDY)) != said
    engine.update_weights_from_disk(tmp_path)
    assert_old(engine, saved, said)
    reloaded = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in reloaded.state_dict().items())


def test_broken_checkpoints(engine, tmp_path) -> None:
    """Each failure that a disk can have: the old weights serve on, and the message says what is wrong."""
    engine.save_sharded_model(tmp_path, max_size="300KB")
    engine.update_weights_from_tensors(other_weights(engine.model, 4))
    files = sorted(tmp_path.glob("*.safetensors"))
    last, whole = files[-1], files[-1].read_bytes()

    def fails(kind, message):
        with refused(engine, kind, message) as error:
            engine.update_weights_from_disk(tmp_path)
        assert not isinstance(error.value, quire.WeightUpdateError) or error.value.name in engine.model.state_dict()

    own = load_file(last)
    last.write_bytes(whole[:-1])  # the last bytes are those of one parameter
    fails(quire.WeightUpdateError, f"{last.name} is incomplete or not .*; the parameter '({'|'.join(own)})' cannot be read")
    for left in (len(whole) // 2, 20, 5, 0):
        last.write_bytes(whole[:left])
        fails(quire.WeightUpdateError, f"{last.name} is incomplete .* the parameter '({'|'.join(own)})' cannot be read")
    last.unlink()
    fails(FileNotFoundError, f"{last.name}, which model.safetensors.index.json names, is missing, and the parameter .* with it")
    last.write_bytes(whole)
    content = load_file(files[0])
    name = next(iter(content))
    save_file({**content, name: content[name][:1]}, files[0])
    fails(quire.WeightUpdateError, f"the parameter '{name}' has shape")
    save_file({n: t for n, t in content.items() if n != name}, files[0])
    fails(quire.WeightUpdateError, f"lacks the parameter '{name}'")
    for file in tmp_path.iterdir():
        file.unlink()
    fails(FileNotFoundError, "no checkpoint at")


@pytest.mark.parametrize("own", [False, True])
def test_saved_over_another_checkpoint(own, tmp_path) -> None:
    """transformers leaves the index of shards that are gone, and a whole file beside new shards, which it reads first."""
    model, small = (Tied(), 2000) if own else (load_model(num_layers=1), "200KB")
    for size in (small, "5GB", small):
        with torch.no_grad():
            model.get_parameter("mix.weight" if own else NORM).add_(1)
        save_checkpoint(tmp_path, model, None, size)
        values = read_checkpoint(tmp_path, model)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())
        assert (tmp_path / "model.safetensors").is_file() != (tmp_path / "model.safetensors.index.json").is_file()
        assert not list(tmp_path.glob("*.before"))
    whole = next(iter(values.items()))
    save_file(dict([whole]), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors and model.safetensors.index.json are of two checkpoints"):
        read_checkpoint(tmp_path, model)
    for file in tmp_path.glob("model-*"):
        file.unlink()
    assert files_of(tmp_path) == [tmp_path / "model.safetensors"]  # as transformers leaves it


def test_checkpoints_with_more_than_the_model_has(engine, tmp_path) -> None:
    """transformers leaves such parameters out with a warning: codes without their scales, a layer without its bias."""
    engine.save_sharded_model(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    saved, config = load_file(file), tmp_path / "config.json"

    def fails(content, message):
        save_file(content, file, metadata={"format": "pt"})
        with refused(engine, quire.WeightUpdateError, message):
            engine.update_weights_from_disk(tmp_path)

    scale = UP.replace("weight", "weight_scale_inv")
    codes = {**saved, UP: (saved[UP] * 100).to(torch.float8_e4m3fn), scale: torch.full((1, 1), 0.01)}
    fails(codes, f"it holds the parameter '{scale}', which LlamaForCausalLM has not. Give the parameters")
    fails({**saved, UP.replace("weight", "bias"): torch.ones(len(saved[UP]))}, "up_proj.bias', which LlamaForCausalLM has not")
    fails({**saved, UP.replace("layers.0", "layers.1"): saved[UP].clone()}, "holds the parameter 'model.layers.1.mlp.up_proj")
    own = json.loads(config.read_text())
    config.write_text(json.dumps({**own, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}))
    fails(saved, "its config has rope_parameters=.*500000.*, the model that is served .*10000.* Make an engine from that path")
    config.write_text(json.dumps({**own, "quantization_config": {"quant_method": "fp8"}}))
    fails(codes, r"it is quantized \(fp8\), and the model that is served is not")


def test_files_of_two_checkpoints_in_one_folder(engine, tmp_path) -> None:
    """Saved whole and in shards, one after the other: it is not clear which is meant."""
    engine.save_sharded_model(tmp_path, max_size="300KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    name, value = next(iter(other_weights(engine.model, 7).items()))
    save_file({name: value}, tmp_path / "model.safetensors")
    with refused(engine, quire.WeightUpdateError, f"both hold the parameter '{name}'"):
        engine.update_weights_from_disk(tmp_path)


def test_a_checkpoint_whose_parameters_transformers_merges(tmp_path) -> None:
    """Mixtral's files hold each expert by itself, its model all of them in one tensor."""
    config = MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1)
    model, other = MixtralForCausalLM(config), MixtralForCausalLM(config)
    other.save_pretrained(tmp_path)
    values = read_checkpoint(tmp_path, model)
    assert not missing_names(model, values)
    write(check_specs(model, [WeightSpec(n, t.dtype, tuple(t.shape)) for n, t in values.items()]), values)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Tied(nn.Module):
    """Not of transformers, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.mix = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False), nn.Linear(16, 16)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    @quire.paged
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(input_ids)).unflatten(-1, (2, 8)).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)) * self.scale


def test_a_model_of_your_own_with_tied_weights(tmp_path) -> None:
    model, other = Tied().eval(), Tied().eval()
    with quire.Engine(other, num_pages=8, max_num_seqs=2, max_model_len=32) as engine:
        want = tokens(engine.generate(IDS, quire.SamplingParams(temperature=0, max_tokens=5)))
        engine.save_sharded_model(tmp_path, max_size=2000)
    with quire.Engine(model, num_pages=8, max_num_seqs=2, max_model_len=32) as engine:
        engine.update_weights_from_disk(tmp_path)
        assert tokens(engine.generate(IDS, quire.SamplingParams(temperature=0, max_tokens=5))) == want
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]


def test_two_values_for_a_tied_parameter() -> None:
    """The last one would win: a head and an embedding that the trainer has untied."""
    model = Tied().eval()
    with quire.Engine(model, num_pages=8, max_num_seqs=2, max_model_len=32) as engine:
        old, new = model.embed.weight.detach().clone(), torch.randn(30, 16)
        mix = torch.zeros(16, 16)
        with pytest.raises(quire.WeightUpdateError, match="'head.weight' and 'embed.weight' are one parameter") as error:
            engine.update_weights_from_tensors({"mix.weight": mix, "embed.weight": new, "head.weight": new + 1})
        assert error.value.name == "head.weight" and torch.equal(model.embed.weight, old) and model.mix.weight.any()
        engine.update_weights_from_tensors({"embed.weight": new, "head.weight": new.clone()})
        assert torch.equal(model.head.weight, new)


def test_two_values_for_one_memory() -> None:
    """Tied by another Parameter of the same memory; and elements that share memory, of which no value can be written."""
    model = nn.Module()
    model.a = nn.Linear(2, 3, bias=False)
    model.b = nn.Parameter(model.a.weight.detach())
    targets = check_specs(model, [WeightSpec(name, torch.float32, (3, 2)) for name in ("a.weight", "b")])
    with pytest.raises(quire.WeightUpdateError, match="are one parameter"):
        write(targets, {"a.weight": torch.zeros(3, 2), "b": torch.ones(3, 2)})
    assert missing_names(model, ["b"]) == []
    model.register_buffer("one", torch.ones(1).expand(4))
    with pytest.raises(quire.WeightUpdateError, match="'one' share memory"):
        check_specs(model, [WeightSpec("one", torch.float32, (4,))])


def test_a_value_that_cannot_be_converted() -> None:
    """No memory for a conversion, after others were made: the parameter is named, and none is written."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    class NoMemory(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    values["1.weight"] = values["1.weight"].as_subclass(NoMemory)
    with pytest.raises(quire.WeightUpdateError, match="'1.weight' could not be converted: CUDA out of memory"):
        write(model.state_dict(keep_vars=True), values)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_quantized_parameters_are_refused_by_name(tmp_path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(quire.WeightUpdateError, match=r"the parameter '0.weight' is quantized \(Int8Tensor|AffineQuantized"):
        check_specs(model, [WeightSpec("0.weight", torch.bfloat16, (32, 32))])
    with pytest.raises(ValueError, match=r"the parameter '0.weight' is quantized .*, which safetensors files cannot hold"):
        save_checkpoint(tmp_path / "saved", model, None, "5GB")
    assert not (tmp_path / "saved").exists()
    model = nn.Linear(3, 3, device="meta")
    with pytest.raises(quire.WeightUpdateError, match="'weight' has no memory"):
        check_specs(model, [WeightSpec("weight", torch.float32, (3, 3))])


# Process group.


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def described(weights: dict[str, torch.Tensor]) -> tuple[list, list, list]:
    return list(weights), [str(t.dtype).removeprefix("torch.") for t in weights.values()], [t.shape for t in weights.values()]


def trainer(port: int, weights: list[torch.Tensor], dies: bool = False) -> None:
    group = quire.WeightsGroup("127.0.0.1", port, 0, 2, timeout=60)
    for tensor in weights:
        group.send(tensor)
    if dies:
        os._exit(1)
    group.close()


def test_over_a_process_group(engine) -> None:
    new, port = other_weights(engine.model, 5), free_port()
    thread = threading.Thread(target=trainer, args=(port, list(new.values())))
    thread.start()
    engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2, timeout=60)
    with pytest.raises(RuntimeError, match="in a group for weight updates already"):
        engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2)
    engine.update_weights_from_distributed(*described(new))
    thread.join()
    engine.destroy_weights_update_group()
    assert all(torch.equal(engine.get_weights_by_name(name), value) for name, value in new.items())
    serves_what_the_model_says(engine)


def test_a_sender_of_other_tensors_than_announced(engine) -> None:
    """The backends do not compare sizes: half as many bytes would be taken, twice as many end the process."""
    before, said = snapshot(engine), tokens(engine.generate(IDS, GREEDY))
    new, port, refused = other_weights(engine.model, 8), free_port(), []
    value = next(iter(new.values()))

    def send() -> None:
        group = quire.WeightsGroup("127.0.0.1", port, 0, 2, timeout=60)
        for other in (value.bfloat16(), value.double(), torch.zeros(3), value):
            try:
                group.send(other, NORM)
            except ValueError as error:
                refused.append(str(error))
        for name, tensor in new.items():
            group.send(tensor, name)
        group.close()

    thread = threading.Thread(target=send)
    thread.start()
    engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2, timeout=60)
    first = next(iter(new))
    for what in ("bfloat16", "float64", "float32", rf"float32 \(.*\) {NORM}, and float32 .* {first}"):
        with pytest.raises(quire.WeightUpdateError, match=f"'{first}' is not what comes: rank 0 sends {what}") as error:
            engine.update_weights_from_distributed(*described(new))
        assert error.value.name == first
    assert_old(engine, before, said)
    engine.update_weights_from_distributed(*described(new))  # the group goes on
    thread.join()
    engine.destroy_weights_update_group()
    assert len(refused) == 4 and all("in the order, dtypes and shapes" in message for message in refused)
    assert all(torch.equal(engine.get_weights_by_name(name), value) for name, value in new.items())


def test_a_sender_that_leaves(engine) -> None:
    """After two of the parameters: the third is named, and none of them is written."""
    new, port = other_weights(engine.model, 6), free_port()
    thread = threading.Thread(target=trainer, args=(port, list(new.values())[:2]))
    thread.start()
    engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2, timeout=1.5)
    with refused(engine, quire.WeightUpdateError, "receiving the parameter") as error:
        engine.update_weights_from_distributed(*described(new))
    thread.join()
    assert error.value.name == list(new)[2]
    with pytest.raises(RuntimeError, match="in no group for weight updates"):
        engine.update_weights_from_distributed([], [], [])


@pytest.mark.slow
def test_a_rank_that_dies(engine) -> None:
    """A process of its own that ends in the middle, without a word."""
    new, port = other_weights(engine.model, 6), free_port()
    process = multiprocessing.get_context("spawn").Process(target=trainer, args=(port, list(new.values())[:3], True))
    process.start()
    engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2, timeout=60)
    with refused(engine, quire.WeightUpdateError, "receiving the parameter") as error:
        engine.update_weights_from_distributed(*described(new))
    process.join()
    assert error.value.name == list(new)[3]


@pytest.mark.parametrize(("dtypes", "message"), [
    (["float32"], "describe 2, 1 and 2 parameters"), (["float32", "flaot32"], "'flaot32' is not a torch dtype"),
])
def test_descriptions_that_do_not_fit(engine, dtypes, message, monkeypatch) -> None:
    """Before anything is received; the group stays, for the right description."""
    shapes = [engine.get_weights_by_name(name).shape for name in (NORM, UP)]
    monkeypatch.setattr(engine, "_weights_group", object())  # nothing may ask it
    with refused(engine, quire.WeightUpdateError, message):
        engine.update_weights_from_distributed([NORM, UP], dtypes, shapes)


def test_groups_that_do_not_form(engine) -> None:
    with pytest.raises(RuntimeError, match="did not form within 0.5 s"):
        engine.init_weights_update_group("127.0.0.1", free_port(), rank=1, world_size=2, timeout=0.5)
    with pytest.raises(ValueError, match="rank 0 sends the weights"):
        engine.init_weights_update_group("127.0.0.1", free_port(), rank=0, world_size=2)
    with pytest.raises(ValueError, match="rank 2 is outside a group of 2"):
        engine.init_weights_update_group("127.0.0.1", free_port(), rank=2, world_size=2)


def test_names_of_tied_parameters() -> None:
    model = Tied()
    assert missing_names(model, ["head.weight", "mix.weight", "scale"]) == ["mix.bias"]

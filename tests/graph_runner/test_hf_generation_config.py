"""The translation of transformers' GenerationConfig: what is honoured, and what is named as unsupported."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from quire.graph_runner import hf_generation_config
from quire.graph_runner.hf_generation_config import for_requests, from_generation_config
from quire.graph_runner.sampling_params import GenerateParams


def from_config(**options: object) -> tuple[GenerateParams, list[str]]:
    return from_generation_config(GenerationConfig(**options), 10)


def test_defaults_are_those_of_generate() -> None:
    assert from_config() == (GenerateParams(temperature=0, max_tokens=20), [])
    assert from_config(do_sample=True) == (GenerateParams(top_k=50, max_tokens=20), [])
    empty = from_generation_config(SimpleNamespace(), 10)
    assert empty == (GenerateParams(temperature=0, max_tokens=20), [])
    options = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "top_h": 0.5}
    assert from_config(do_sample=False, **options) == (GenerateParams(temperature=0, max_tokens=20), [])


def test_options() -> None:
    params, unsupported = from_config(
        do_sample=True, temperature=0.7, top_k=0, top_p=0.9, min_p=0.05, max_new_tokens=7, min_new_tokens=2,
        stop_strings=["a", "b"], eos_token_id=[5, 6], num_return_sequences=3,
    )
    assert unsupported == []
    assert params == GenerateParams(
        n=3, temperature=0.7, top_k=0, top_p=0.9, min_p=0.05, max_tokens=7, min_tokens=2, stop=["a", "b"],
        stop_token_ids=[5, 6], ignore_eos=True,
    )
    assert from_config(eos_token_id=5)[0].stop_token_ids == (5,)
    nothing_ends_it = from_config(eos_token_id=-1)[0]
    assert (nothing_ends_it.stop_token_ids, nothing_ends_it.ignore_eos) == ((), True)


def test_lengths_that_count_the_prompt() -> None:
    config = GenerationConfig(max_length=30, min_length=12)
    params, unsupported = from_generation_config(config, 10)
    assert (params.max_tokens, params.min_tokens, unsupported) == (20, 2, [])
    params, unsupported = from_generation_config(config, 15)
    assert (params.max_tokens, params.min_tokens, unsupported) == (15, 0, [])
    with pytest.raises(ValueError, match="max_length=30 counts the prompt's tokens too, and the prompt has 30"):
        from_generation_config(config, 30)
    # max_new_tokens and min_new_tokens win over them.
    config = GenerationConfig(max_length=30, min_length=12, max_new_tokens=4, min_new_tokens=6)
    params, unsupported = from_generation_config(config, 10)
    assert (params.max_tokens, params.min_tokens, unsupported) == (4, 4, [])  # generate stops at the maximum, too


REFUSED_VALUES = {
    "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": ["x"], "force_words_ids": [[1]],
    "dola_layers": "low", "penalty_alpha": 0.6, "assistant_ensemble_weight": 0.5, "is_assistant": True,
    "repetition_penalty": 1.1, "encoder_repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]], "forced_bos_token_id": 0, "forced_eos_token_id": 0, "remove_invalid_values": True,
    "exponential_decay_length_penalty": (1, 1.1), "suppress_tokens": [1], "begin_suppress_tokens": [1],
    "sequence_bias": [[[1], 0.5]], "token_healing": True, "guidance_scale": 1.5, "watermarking_config": {"bias": 2.0},
    "top_h": 0.4, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "max_time": 1.0, "output_attentions": True,
    "output_hidden_states": True, "output_scores": True, "output_logits": True,
    "cache_implementation": "quantized",
}
NEEDS = {
    "early_stopping": {"num_beams": 2}, "length_penalty": {"num_beams": 2}, "top_h": {"do_sample": True},
    "typical_p": {"do_sample": True}, "epsilon_cutoff": {"do_sample": True}, "eta_cutoff": {"do_sample": True},
    "output_attentions": {"return_dict_in_generate": True}, "output_hidden_states": {"return_dict_in_generate": True},
    "output_scores": {"return_dict_in_generate": True}, "output_logits": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_names_what_it_cannot_honour(name: str) -> None:
    assert from_config(**{name: REFUSED_VALUES[name]}, **NEEDS.get(name, {}))[1] == [name]


def test_what_requests_have_by_themselves() -> None:
    def of(**options: object) -> tuple[GenerateParams, list[str]]:
        return for_requests(GenerationConfig(**options), 10)

    params, others = of(repetition_penalty=1.3, suppress_tokens=(4, -1, 5), bad_words_ids=[[3], [5], [2]], eos_token_id=[2])
    assert (params.repetition_penalty, sorted(params.excluded), others) == (1.3, [3, 4, 5], [])
    for name, value in (("bad_words_ids", [[3], [4, 5]]), ("bad_words_ids", []), ("bad_words_ids", [[-1]]),
                        ("bad_words_ids", [["a"]]), ("bad_words_ids", [3]), ("suppress_tokens", [1.0])):
        assert of(**{name: value})[1] == [name] and of(**{name: value})[0].excluded == ()


def test_beams_and_contrastive_search() -> None:
    assert from_config(num_beams=2, early_stopping=True, length_penalty=2.0)[1] == [
        "num_beams", "early_stopping", "length_penalty"]
    assert from_config(early_stopping=True, length_penalty=2.0)[1] == []
    assert from_config(num_beams=3, num_return_sequences=3)[0].n == 1  # of the requests, whose beams are returned
    assert from_config(penalty_alpha=0.6, do_sample=True)[1] == []
    assert from_config(penalty_alpha=0.6, top_k=1)[1] == []


def test_values_without_effect() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    defaults.pop("max_length")
    assert from_config(**defaults)[1] == []
    assert from_config(**{**defaults, "do_sample": True})[1] == []
    neutral = {"suppress_tokens": [], "begin_suppress_tokens": [], "guidance_scale": 1.0,
               "renormalize_logits": True, "use_cache": False, "prompt_lookup_num_tokens": 3, "cache_implementation": "static"}
    assert from_config(**neutral)[1] == []


def test_every_option_of_the_installed_transformers_is_known() -> None:
    """When this fails, transformers has a new option: put it in one of the two tables of hf_generation_config.py."""
    known = hf_generation_config._REFUSED.keys() | hf_generation_config._ACCEPTED
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names <= known
    assert not hf_generation_config._REFUSED.keys() & hf_generation_config._ACCEPTED
    assert REFUSED_VALUES.keys() | {"early_stopping", "length_penalty"} == hf_generation_config._REFUSED.keys()


def test_options_of_a_newer_transformers_are_named() -> None:
    class NewerConfig:
        def __init__(self) -> None:
            self.new_warper: float | None = None
            self.other_warper: float | None = None

    config = NewerConfig()
    config.new_warper = 0.5
    assert from_generation_config(config, 10)[1] == ["new_warper"]
    # Keys that a model repository adds to generation_config.json are not options: generate does not read them.
    assert from_config(chat_format="chatml")[1] == []

"""A converted GGUF file must be the model that was stored, down to the last element."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from runtime import gguf_weights
from runtime.errors import ModelLoadError, UnsupportedModelError
from runtime.gguf_conversion import convert_gguf
from tests.runtime.tiny_gguf import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    START,
    TOKENS,
    TYPES,
    VOCAB,
    convert_tiny_gguf,
    random_weights,
    tiny_metadata,
    write_gguf,
    write_tiny_gguf,
)

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def config_of(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    assert isinstance(config, dict)
    return config


# Weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.bfloat16),
        ("Q4_1", torch.bfloat16),
    ],
)
def test_weights_are_those_stored_under_hugging_face_names(
    tmp_path: Path, encoding: str, dtype: torch.dtype, tied: bool
) -> None:
    path, target = tmp_path / "tiny.gguf", tmp_path / "converted"
    target.mkdir()
    held = write_gguf(path, tiny_metadata(), random_weights(tied=tied), encoding=encoding)
    convert_gguf(path, target)

    converted = load_file(target / "model.safetensors")
    assert converted.keys() == held.keys()
    for name, values in held.items():
        assert torch.equal(converted[name], torch.from_numpy(values).to(dtype)), name
    config = config_of(target)
    assert config["tie_word_embeddings"] is tied
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_weights_equal_what_transformers_decodes_from_the_same_file(tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    target = convert_tiny_gguf(
        tmp_path, tiny_metadata(), random_weights(tied=False), encoding="Q4_1"
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    peer = load_gguf_checkpoint(tmp_path / "tiny.gguf", return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    converted = load_file(target / "model.safetensors")
    assert converted.keys() == peer.keys()
    for name, values in converted.items():
        assert torch.equal(values, peer[name].to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("architecture", "biases", "window", "kind"),
    [
        ("llama", [], None, "llama"),
        ("llama", ATTENTION + MLP, None, "llama"),
        ("llama", [], 8, "mistral"),
        ("qwen2", [], None, "qwen2"),
        ("qwen3", [], None, "qwen3"),
        ("qwen3", ATTENTION, None, "qwen3"),
    ],
)
def test_logits_equal_those_of_the_model_that_was_stored(
    tmp_path: Path, architecture: str, biases: list[str], window: int | None, kind: str
) -> None:
    metadata = tiny_metadata(architecture)
    if window:
        metadata[f"{architecture}.attention.sliding_window"] = window
    weights = random_weights(architecture, biases=biases, tied=False)
    target = convert_tiny_gguf(tmp_path, metadata, weights, architecture=architecture)

    options: dict[str, Any] = {"sliding_window": window} if kind == "mistral" else {}
    if kind in ("llama", "qwen3"):
        options["attention_bias"] = bool(biases)
    if kind == "llama":
        options["mlp_bias"] = bool(biases)
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=False,
        **options,
    )
    original = AutoModelForCausalLM.from_config(config).eval()
    original.load_state_dict({name: torch.from_numpy(v) for name, v in weights.items()})
    converted = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    assert type(converted) is type(original)
    ids = torch.arange(20)[None] * 7 % VOCAB
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)


def test_slices_of_a_tensor_join_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert_tiny_gguf(tmp_path, tiny_metadata(), random_weights(), encoding="Q8_0")
    expected = (whole / "model.safetensors").read_bytes()
    monkeypatch.setattr(gguf_weights, "_ELEMENTS_PER_SLICE", 5 * HIDDEN)  # cuts heads, too
    target = tmp_path / "sliced"
    target.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", target)
    assert (target / "model.safetensors").read_bytes() == expected


# Config


def test_config_holds_what_the_metadata_say(tmp_path: Path) -> None:
    config = config_of(convert_tiny_gguf(tmp_path, tiny_metadata(), random_weights()))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "head_dim": HEAD_DIM,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "pad_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected


def test_generation_config_has_every_end_id_once(tmp_path: Path) -> None:
    metadata = tiny_metadata() | {"tokenizer.ggml.eom_token_id": 1}
    target = convert_tiny_gguf(tmp_path, metadata, random_weights())
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 1}


def test_roles_that_the_file_leaves_open_stay_open(tmp_path: Path) -> None:
    metadata = tiny_metadata()
    for role in ("bos", "eos", "eot", "padding"):
        del metadata[f"tokenizer.ggml.{role}_token_id"]
    config = AutoConfig.from_pretrained(convert_tiny_gguf(tmp_path, metadata, random_weights()))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_carried_over(
    tmp_path: Path, scaling: dict[str, Any], expected: dict[str, Any]
) -> None:
    metadata = tiny_metadata() | {f"llama.rope.scaling.{k}": v for k, v in scaling.items()}
    target = convert_tiny_gguf(tmp_path, metadata, random_weights())
    assert config_of(target)["rope_parameters"] == expected | {"rope_theta": 50_000.0}
    AutoConfig.from_pretrained(target)


def llama3_divisors(config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What llama.cpp's converter stores: plain frequencies over scaled ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theta = config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / HEAD_DIM)
    divisors: np.ndarray[Any, np.dtype[np.float32]] = (plain / scaled).numpy()
    return divisors


def test_llama3_rope_scaling_is_recognised_from_its_divisors(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model(
        "llama", head_dim=HEAD_DIM, max_position_embeddings=131_072, rope_parameters=parameters
    )
    divisors = llama3_divisors(config)
    assert any(1.0 < divisor < 8.0 for divisor in divisors), "low and high must matter"
    metadata = tiny_metadata() | {
        "llama.rope.freq_base": 10_000.0,
        "llama.context_length": 131_072,
    }
    target = convert_tiny_gguf(
        tmp_path, metadata, random_weights(), extra={"rope_freqs.weight": divisors}
    )
    assert config_of(target)["rope_parameters"] == parameters


def test_unknown_rope_divisors_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight is not the frequency"):
        convert_tiny_gguf(
            tmp_path, tiny_metadata(), random_weights(), extra={"rope_freqs.weight": divisors}
        )


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type is 'longrope'; none, linear"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor = 0.5"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8 where heads have 16"),
        ({"llama.attention.value_length": 8}, "value_length is 8 where heads have 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs between layers"),
        ({"split.count": 3}, "one of 3 parts of a split model; merge them"),
        ({"tokenizer.ggml.pre": "chameleon"}, "pre is 'chameleon'; these can be read: default"),
        ({"tokenizer.ggml.model": "bert"}, "model is 'bert'; gpt2 and llama can be read"),
    ],
)
def test_options_that_are_not_implemented_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        convert_tiny_gguf(tmp_path, tiny_metadata() | change, random_weights())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.embedding_length": 0}, "embedding_length is 0, but must be positive"),
        ({"llama.embedding_length": "64"}, "embedding_length is '64', but must be int"),
        ({"llama.attention.head_count": 7}, "lacks llama.attention.key_length, and 64 / 7"),
        ({"llama.embedding_length": 32}, "has shape .* but the metadata say"),
        ({"llama.block_count": 3}, r"lacks blk\.2\.attn_q\.weight, .* and 4 more"),
        ({"tokenizer.ggml.eos_token_id": VOCAB}, f"eos_token_id is {VOCAB}, but there are"),
        ({"tokenizer.ggml.merges": ["1 2", "zz q"]}, "merge 1 is 'zz q'"),
        ({"tokenizer.ggml.merges": ["12"]}, "merge 0 is '12'"),
        ({"tokenizer.ggml.token_type": TYPES[:-1]}, f"{VOCAB} tokens, but {VOCAB - 1} token types"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-2], START, "x"]}, "'<|start|>' occurs twice"),
        (
            {"tokenizer.ggml.tokens": [*TOKENS, "new"], "tokenizer.ggml.token_type": [*TYPES, 1]},
            f"has {VOCAB + 1} tokens, but {VOCAB} embeddings",
        ),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message.replace("|", r"\|")):
        convert_tiny_gguf(tmp_path, tiny_metadata() | change, random_weights())


def test_missing_metadata_are_named(tmp_path: Path) -> None:
    metadata = tiny_metadata()
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ModelLoadError, match=r"lacks the metadata key tokenizer\.ggml\.pre"):
        convert_tiny_gguf(tmp_path, metadata, random_weights())


def test_tensors_that_the_model_lacks_are_refused_by_name(tmp_path: Path) -> None:
    weights = random_weights(biases=["self_attn.q_proj"])  # Llama has all four biases or none
    with pytest.raises(UnsupportedModelError, match=r"doesn't have: blk\.0\.attn_q\.bias"):
        convert_tiny_gguf(tmp_path, tiny_metadata(), weights)


def test_a_window_of_qwen_is_refused(tmp_path: Path) -> None:
    metadata = tiny_metadata("qwen2") | {"qwen2.attention.sliding_window": 64}
    with pytest.raises(UnsupportedModelError, match="which layers it applies to is not stored"):
        convert_tiny_gguf(tmp_path, metadata, random_weights("qwen2"), architecture="qwen2")


@pytest.mark.parametrize("architecture", ["gemma3", "mistral"])
def test_other_architectures_are_refused_with_the_list(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*llama, qwen2, qwen3"):
        convert_tiny_gguf(
            tmp_path, tiny_metadata(architecture), random_weights(), architecture=architecture
        )


@pytest.mark.parametrize("keep", [0, 3, 100, 5_000, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    os.truncate(path, keep if keep >= 0 else path.stat().st_size - 100_000)
    with pytest.raises(ModelLoadError, match="truncated or damaged"):
        convert_gguf(path, tmp_path)

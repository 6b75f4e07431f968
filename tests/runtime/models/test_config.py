"""Model configs: read as transformers reads them, or refused by name."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from runtime.errors import ModelLoadError, UnsupportedModelError
from runtime.models import SUPPORTED_ARCHITECTURES, DecoderConfig, load_decoder_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., DecoderConfig]:
    """read(base, **options): DecoderConfig of a config.json with these fields."""

    def read_config(base: dict[str, Any], **options: Any) -> DecoderConfig:
        (tmp_path / "config.json").write_text(json.dumps({**base, **options}))
        return load_decoder_config(tmp_path)

    return read_config


def test_every_field_of_a_llama_config_is_read(read: Callable[..., DecoderConfig]) -> None:
    config = read(
        LLAMA,
        head_dim=32,
        rms_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (300, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.rms_norm_eps) == (32, 1e-5)
    assert config.windows == (None, None)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert (config.qk_norm, config.tie_word_embeddings) == (False, True)
    assert config.declared_dtype == torch.bfloat16
    assert config.max_position_embeddings == 128


def test_a_config_cannot_be_changed(read: Callable[..., DecoderConfig]) -> None:
    with pytest.raises(FrozenInstanceError):
        read(LLAMA).num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "base, biases, qk_norm",
    [
        (LLAMA, (False, False, False), False),
        (MISTRAL, (False, False, False), False),
        (QWEN2, (True, False, False), False),
        (QWEN3, (False, False, False), True),
        ({**QWEN3, "attention_bias": True}, (True, True, False), True),
    ],
)
def test_each_family_has_its_biases_and_norms(
    read: Callable[..., DecoderConfig],
    base: dict[str, Any],
    biases: tuple[bool, ...],
    qk_norm: bool,
) -> None:
    config = read(base)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == qk_norm


def test_absent_and_null_sizes_take_transformers_defaults(
    read: Callable[..., DecoderConfig],
) -> None:
    config = read(LLAMA, num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert read(QWEN3).head_dim == 128


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_a_config_object_without_architectures_is_known_by_its_model_type(
    config_class: type[PreTrainedConfig],
) -> None:
    architecture = DecoderConfig.from_hf(config_class()).architecture
    assert architecture == config_class.__name__.replace("Config", "ForCausalLM")
    assert architecture in SUPPORTED_ARCHITECTURES


@pytest.mark.parametrize(
    "fields, theta, kind",
    [
        ({}, 10_000.0, "default"),
        ({"rope_theta": 500_000.0}, 500_000.0, "default"),
        ({"rope_theta": 500_000}, 500_000.0, "default"),
        ({"rope_parameters": {"rope_theta": 500_000.0}}, 500_000.0, "default"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500_000.0},
            500_000.0,
            "default",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 500_000.0}},
            500_000.0,
            "linear",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500_000.0},
            500_000.0,
            "linear",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 10_000.0, "dynamic"),
        ({"rope_scaling": None, "rope_theta": 500_000.0}, 500_000.0, "default"),
    ],
)
def test_rope_theta_and_kind_are_found_wherever_a_config_states_them(
    read: Callable[..., DecoderConfig], fields: dict[str, Any], theta: float, kind: str
) -> None:
    rope = read(LLAMA, **fields).rope
    assert (rope.theta, rope.kind) == (theta, kind)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500_000.0, "rope_parameters": {"rope_theta": 10_000.0}},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0},
        },
    ],
)
def test_rotary_options_stated_twice_with_different_values_are_refused(
    read: Callable[..., DecoderConfig], fields: dict[str, Any]
) -> None:
    with pytest.raises(ModelLoadError, match="rope_theta twice"):
        read(LLAMA, **fields)


def test_original_length_beside_the_rotary_options_is_used_as_transformers_uses_it(
    read: Callable[..., DecoderConfig],
) -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    config = read(LLAMA, rope_scaling=scaling, original_max_position_embeddings=32)
    assert config.rope.original_max_position == 32


def test_missing_rotary_factor_is_named(read: Callable[..., DecoderConfig]) -> None:
    with pytest.raises(ModelLoadError, match="high_freq_factor"):
        read(LLAMA, rope_scaling={"rope_type": "llama3", "factor": 8.0})


@pytest.mark.parametrize(
    "base, windows",
    [
        (MISTRAL, (4096, 4096)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({**MISTRAL, "sliding_window": 8}, (8, 8)),
        ({**QWEN2, "sliding_window": 8}, (None, None)),
        (
            {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            (None, 8),
        ),
        (
            {
                **QWEN3,
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_windows_per_layer(
    read: Callable[..., DecoderConfig], base: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(base).windows == windows


@pytest.mark.parametrize(
    "stated, dtype",
    [
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, torch.float16),
        ({}, None),
        ({"dtype": None}, None),
    ],
)
def test_declared_dtype_comes_from_the_new_or_the_old_field(
    read: Callable[..., DecoderConfig], stated: dict[str, Any], dtype: torch.dtype | None
) -> None:
    assert read(LLAMA, **stated).declared_dtype == dtype


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_declared_dtypes_that_weights_cannot_have_are_refused(
    read: Callable[..., DecoderConfig], dtype: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=dtype):
        read(LLAMA, dtype=dtype)


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel"),
        ({"architectures": [], "model_type": "gemma2"}, "gemma2"),
        ({"architectures": None, "model_type": "a-new-one"}, "a-new-one"),
        ({"model_type": "mistral"}, "model_type 'mistral'"),
    ],
)
def test_unsupported_architectures_are_refused_with_the_supported_ones(
    read: Callable[..., DecoderConfig], fields: dict[str, Any], word: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=word) as caught:
        read(LLAMA, **fields)
    if "architectures" in fields:
        assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    "base, options, word",
    [
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        (LLAMA, {"is_causal": False}, "is_causal"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        (LLAMA, {"residual_multiplier": 0.2}, "residual_multiplier = 0.2"),
        (LLAMA, {"sliding_window": 8}, "sliding_window 8"),
        (LLAMA, {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        (MISTRAL, {"attention_bias": True}, "attention_bias = True.*Mistral"),
        (MISTRAL, {"layer_types": ["sliding_attention", "full_attention"]}, "ministral"),
        (QWEN2, {"mlp_bias": True}, "mlp_bias = True.*Qwen2"),
        (QWEN2, {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        (LLAMA, {"per_layer_config": {"1": {"num_key_value_heads": 4}}}, "per_layer_config"),
    ],
)
def test_options_that_change_the_numbers_are_refused_by_name(
    read: Callable[..., DecoderConfig], base: dict[str, Any], options: dict[str, Any], word: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        read(base, **options)


def test_mistral_with_mixed_layer_types_is_refused() -> None:
    hf_config = MistralConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    with pytest.raises(UnsupportedModelError, match="full_attention"):
        DecoderConfig.from_hf(hf_config)


def test_options_with_neutral_values_are_taken(read: Callable[..., DecoderConfig]) -> None:
    neutral = {"rope_interleaved": False, "use_mrope": False, "residual_multiplier": 1.0}
    assert read(LLAMA, is_llama_config=True, quantization_config=None, **neutral).num_layers == 2


@pytest.mark.parametrize(
    "options, word",
    [
        ({"num_key_value_heads": 3}, "num_heads 4 .* num_kv_heads 3"),
        ({"hidden_size": -64}, "hidden_size .* -64"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size .* 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"dtype": "nonsense"}, "nonsense"),
    ],
)
def test_senseless_sizes_are_refused_by_name(
    read: Callable[..., DecoderConfig], options: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelLoadError, match=word):
        read(LLAMA, **options)


def test_odd_head_dim_is_refused_by_name(read: Callable[..., DecoderConfig]) -> None:
    config = read(LLAMA)
    with pytest.raises(UnsupportedModelError, match="head_dim 15"):
        replace(config, head_dim=15)


def test_sliding_layers_without_a_window_are_refused(read: Callable[..., DecoderConfig]) -> None:
    layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ModelLoadError, match="use_sliding_window"):
        read(QWEN2, sliding_window=8, layer_types=layer_types)


@pytest.mark.parametrize("window", [0, -1])
def test_empty_windows_are_refused(read: Callable[..., DecoderConfig], window: int) -> None:
    with pytest.raises(ModelLoadError, match="sliding_window"):
        read(MISTRAL, sliding_window=window)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_malformed_config_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_decoder_config(tmp_path)


def test_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_decoder_config(tmp_path)

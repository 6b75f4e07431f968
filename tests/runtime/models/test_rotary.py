"""Rotary parameters are read as transformers reads them, and turn heads by the same angles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from runtime.errors import ModelLoadError, UnsupportedModelError
from runtime.models import DecoderConfig
from runtime.models.rotary import gather_rotary, rotary_table, rotate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from runtime.models import Decoder

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "default, theta 500000": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, theta 1000000": {**YARN, "rope_theta": 1_000_000},
    "yarn, own attention factor": {**YARN, "attention_factor": 1.5},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, factor from lengths": {**YARN, "factor": None},
}


def config_with(
    rope: dict[str, Any], head_dim: int = 16, max_position_embeddings: int = 256, **options: Any
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=dict(rope),
        **options,
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_table_holds_transformers_cos_and_sin(kind: str, head_dim: int) -> None:
    hf_config = config_with(KINDS[kind], head_dim)
    config = DecoderConfig.from_hf(hf_config)
    table = rotary_table(config.rope, head_dim, 5000, CPU)
    positions = torch.arange(5000)
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.empty(0), positions[None])
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("factor", [2.0, 2.3])
def test_dynamic_rows_are_those_of_a_sequence_that_just_reached_them(factor: float) -> None:
    hf_config = config_with({"rope_type": "dynamic", "factor": factor}, max_position_embeddings=64)
    config = DecoderConfig.from_hf(hf_config)
    table = rotary_table(config.rope, 16, config.max_position_embeddings, CPU)
    for position in (0, 1, 62, 63, 64, 65, 100, int(64 * factor) - 1):
        cos, sin = LlamaRotaryEmbedding(hf_config)(torch.empty(0), torch.tensor([[position]]))
        expected = torch.cat((cos[0, 0, :8], sin[0, 0, :8]))
        torch.testing.assert_close(table[position], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_bit_equal_to_transformers(dtype: torch.dtype) -> None:
    hf_config = config_with(KINDS["default"])
    config = DecoderConfig.from_hf(hf_config)
    positions = torch.tensor([0, 5, 17, 255])
    heads = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = LlamaRotaryEmbedding(hf_config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    factors = gather_rotary(rotary_table(config.rope, 16, 256, CPU), positions, dtype)
    assert torch.equal(rotate(heads, factors), expected[0])


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("kind", ["default, theta 500000", "linear", "llama3", "yarn"])
def test_logits_equal_transformers_at_small_and_large_positions_of_every_kind(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    config_class: type[PreTrainedConfig],
    kind: str,
) -> None:
    model = make_checkpoint(
        config_class, head_dim=16, max_position_embeddings=2048, rope_parameters=dict(KINDS[kind])
    )
    near = torch.arange(8)
    positions = torch.cat((near, near + 60, near + 1000, near + 2040))  # 64: before extension
    ids = torch.arange(len(positions)) * 7 % 300
    torch.testing.assert_close(
        decoder_logits(load(tmp_path), ids, positions),
        transformers_logits(model, ids, positions),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_dynamic_logits_equal_transformers_decoding_with_its_cache_past_the_original_length(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    model = make_checkpoint(
        LlamaConfig,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0},
    )
    decoder = load(tmp_path)
    assert decoder.config.max_position_embeddings == 64
    ids = torch.arange(64) * 7 % 300
    with torch.no_grad():
        output = model(ids[None, :20], use_cache=True)
        steps = [output.logits[0]]
        for position in range(20, 64):
            output = model(
                ids[None, position : position + 1],
                past_key_values=output.past_key_values,
                use_cache=True,
            )
            steps.append(output.logits[0])
    torch.testing.assert_close(decoder_logits(decoder, ids), torch.cat(steps), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "rope, stated, usable",
    [
        ({"rope_type": "default"}, 256, 256),
        ({"rope_type": "linear", "factor": 2.5}, 256, 640),
        ({"rope_type": "dynamic", "factor": 2.0}, 256, 512),
        (LLAMA3, 256, 256),
        (YARN, 64, 256),  # the config states the length before extension
        (YARN, 256, 256),  # or the one after it
        ({"rope_type": "yarn", "factor": 4.0}, 64, 256),
    ],
)
def test_usable_length_counts_the_extension_once(
    rope: dict[str, Any], stated: int, usable: int
) -> None:
    config = DecoderConfig.from_hf(config_with(rope, max_position_embeddings=stated))
    assert config.max_position_embeddings == usable


@pytest.mark.parametrize(
    "rope, word",
    [
        ({"rope_type": "alibi"}, "alibi"),
        ({"rope_type": "mrope", "mrope_section": [2, 3, 3]}, "mrope"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "longrope",
        ),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_rotary_variants_that_are_not_implemented_are_refused_by_name(
    rope: dict[str, Any], word: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        DecoderConfig.from_hf(config_with(rope))


@pytest.mark.parametrize(
    "rope, word",
    [
        ({"rope_type": "linear", "factor": 0.0}, "factor .* 0.0"),
        ({"rope_type": "linear", "factor": "2"}, "factor .* '2'"),
        ({"rope_type": "default", "rope_theta": "10000"}, "rope_theta .* '10000'"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta .* -1.0"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor .* low_freq_factor"),
        (
            {**YARN, "original_max_position_embeddings": -64},
            "original_max_position_embeddings .* -64",
        ),
    ],
)
def test_senseless_rotary_values_are_refused_by_name_and_value(
    rope: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelLoadError, match=word):
        DecoderConfig.from_hf(config_with(rope))


def test_dynamic_scaling_of_two_dimensional_heads_is_refused() -> None:
    hf_config = config_with({"rope_type": "dynamic", "factor": 2.0}, head_dim=2)
    with pytest.raises(UnsupportedModelError, match="head_dim 2"):
        DecoderConfig.from_hf(hf_config)

"""The decoder computes what transformers computes, for every family and option."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runtime.models import PLAIN_REGIONS
from runtime.models.decoder import between, rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from runtime.models import Decoder

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3 with biases": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
}
IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_for_every_family_and_head_grouping(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    family: str,
    num_kv_heads: int,
) -> None:
    config_class, options = FAMILIES[family]
    model = make_checkpoint(config_class, num_key_value_heads=num_kv_heads, **options)
    decoder = load(tmp_path)
    expected = transformers_logits(model, IDS)
    torch.testing.assert_close(decoder_logits(decoder, IDS), expected, atol=1e-5, rtol=1e-4)
    assert expected.std() > 0.1  # the comparison means something


@pytest.mark.parametrize(
    "hidden_size, head_dim, num_kv_heads",
    [(64, 32, 1), (64, 32, 2), (64, 32, 4), (128, 64, 2), (64, 6, 2), (256, 64, 2)],
)
@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_logits_equal_transformers_for_every_head_dim(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    config_class: type[PreTrainedConfig],
    hidden_size: int,
    head_dim: int,
    num_kv_heads: int,
) -> None:
    model = make_checkpoint(
        config_class, hidden_size=hidden_size, head_dim=head_dim, num_key_value_heads=num_kv_heads
    )
    decoder = load(tmp_path)
    assert decoder.config.head_dim == head_dim
    torch.testing.assert_close(
        decoder_logits(decoder, IDS), transformers_logits(model, IDS), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_logits_equal_transformers_with_tied_and_own_head(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    config_class: type[PreTrainedConfig],
    tied: bool,
) -> None:
    model = make_checkpoint(config_class, tie_word_embeddings=tied, head_dim=16)
    decoder = load(tmp_path)
    assert (decoder.lm_head is None) == tied
    torch.testing.assert_close(
        decoder_logits(decoder, IDS), transformers_logits(model, IDS), atol=1e-5, rtol=1e-4
    )


WINDOWED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": (MistralConfig, {"sliding_window": 8}, (8, 8, 8)),
    "mistral, window 1": (MistralConfig, {"sliding_window": 1}, (1, 1, 1)),
    "qwen2, upper layers": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        (None, 8, 8),
    ),
    "qwen2, not used": (
        Qwen2Config,
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        (None, None, None),
    ),
    "qwen3, by layer type": (
        Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (5, None, 5),
    ),
}


@pytest.mark.parametrize("case", WINDOWED)
def test_logits_equal_transformers_with_windows_shorter_than_the_sequence(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    case: str,
) -> None:
    config_class, options, windows = WINDOWED[case]
    model = make_checkpoint(config_class, head_dim=16, **options)
    decoder = load(tmp_path)
    assert decoder.config.windows == windows
    torch.testing.assert_close(
        decoder_logits(decoder, IDS), transformers_logits(model, IDS), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_where_transformers_rounds(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    exact = transformers_logits(make_checkpoint(Qwen3Config, head_dim=16), IDS)
    rounded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, attn_implementation="eager"
    )
    expected = transformers_logits(rounded.eval(), IDS)
    actual = decoder_logits(load(tmp_path, dtype), IDS)
    assert (actual - expected).abs().mean() < 0.1 * (expected - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_bit_equal_to_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    reference.weight.data.normal_(1.0, 0.3)
    heads = (torch.randn(7, 9, 96) * 3).to(dtype)[:, 2:5]  # strided, as queries and keys are
    assert torch.equal(rms_norm(heads, reference.weight, 1e-5), reference(heads))


def test_int32_token_ids_are_taken(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig)
    decoder = load(tmp_path)
    assert torch.equal(decoder_logits(decoder, IDS.int()), decoder_logits(decoder, IDS))


def test_one_layer_decoder_has_no_region_between_attentions(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    model = make_checkpoint(LlamaConfig, num_hidden_layers=1)
    torch.testing.assert_close(
        decoder_logits(load(tmp_path), IDS), transformers_logits(model, IDS), atol=1e-5, rtol=1e-4
    )


def test_attention_is_called_once_per_layer_in_order_with_heads_of_its_shapes(
    make_checkpoint: Callable[..., PreTrainedModel], load: Callable[..., Decoder], tmp_path: Path
) -> None:
    make_checkpoint(LlamaConfig)
    calls = []

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        calls.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        return query

    hidden = load(tmp_path)(IDS, torch.arange(40), attend)
    assert hidden.shape == (40, 64)
    assert calls == [(layer, (40, 4, 16), (40, 2, 16), (40, 2, 16)) for layer in range(3)]


def test_no_parameter_or_result_keeps_gradients(
    make_checkpoint: Callable[..., PreTrainedModel], load: Callable[..., Decoder], tmp_path: Path
) -> None:
    make_checkpoint(LlamaConfig)
    decoder = load(tmp_path)
    hidden = decoder(IDS, torch.arange(40), lambda layer, query, key, value: query)
    assert not hidden.requires_grad
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_logits_are_float32_whatever_the_weights_are(
    make_checkpoint: Callable[..., PreTrainedModel], load: Callable[..., Decoder], tmp_path: Path
) -> None:
    make_checkpoint(LlamaConfig)
    decoder = load(tmp_path, torch.bfloat16)
    logits = decoder.compute_logits(torch.randn(3, 64, dtype=torch.bfloat16))
    assert (logits.dtype, logits.shape) == (torch.float32, (3, 300))


def test_region_between_attentions_compiles_once_for_all_layers_and_token_counts(
    make_checkpoint: Callable[..., PreTrainedModel], load: Callable[..., Decoder], tmp_path: Path
) -> None:
    make_checkpoint(Qwen3Config, num_hidden_layers=4, head_dim=16)
    decoder = load(tmp_path)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(between, backend=counter, dynamic=True, fullgraph=True)
    regions = dataclasses.replace(PLAIN_REGIONS, between=compiled)
    for count in (40, 1, 7, 33, 2, 1, 128):
        decoder(
            torch.zeros(count, dtype=torch.long),
            torch.arange(count),
            lambda layer, query, key, value: query.contiguous(),
            regions,
        )
    torch._dynamo.reset()
    assert counter.frame_count == 2  # one token, and any number

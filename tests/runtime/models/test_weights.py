"""Loading: every tensor into its place, or an error that names what is wrong."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from runtime.errors import ConfigError, ModelLoadError, UnsupportedModelError
from runtime.models import DecoderConfig, load_decoder, load_decoder_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from runtime.models import Decoder

CPU = torch.device("cpu")
IDS = torch.arange(20) * 7 % 300
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def edit_weights(tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], None]:
    """edit(change): applies change(tensors) to the saved checkpoint's single file."""

    def edit(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file({name: t.clone() for name, t in tensors.items()}, file, {"format": "pt"})

    return edit


def reload(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    "config_class, options",
    [
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        (Qwen2Config, {}),
        (Qwen3Config, {"head_dim": 32}),
    ],
)
def test_sharded_checkpoints_load_like_single_files(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    config_class: type[PreTrainedConfig],
    options: dict[str, Any],
) -> None:
    model = make_checkpoint(config_class, max_shard_size="60KB", **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    torch.testing.assert_close(
        decoder_logits(load(tmp_path), IDS), transformers_logits(model, IDS), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_asked_dtype(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    model = make_checkpoint(LlamaConfig)
    decoder = load(tmp_path, dtype)
    assert all(parameter.dtype == dtype for parameter in decoder.parameters())
    attention = model.model.layers[1].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    fused = torch.cat([projection.weight for projection in projections]).to(dtype)
    assert torch.equal(decoder.layers[1].qkv_weight, fused)


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(HEAD, None)


def keep_only_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def add_equal_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING]


def add_other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].flip(0) * 2


@pytest.mark.parametrize(
    "change, own_head",
    [
        (drop_head, False),
        (keep_only_head, False),
        (add_equal_head, False),
        (add_other_head, True),
    ],
)
def test_tied_heads_follow_transformers_whichever_tensors_are_stored(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, torch.Tensor]], None],
    own_head: bool,
) -> None:
    make_checkpoint(LlamaConfig, tie_word_embeddings=True)
    edit_weights(change)
    with caplog.at_level(logging.WARNING, logger="stepgraph.runtime"):
        decoder = load(tmp_path)
    assert (decoder.lm_head is not None) == own_head
    assert ("two different ones" in caplog.text) == own_head
    expected = transformers_logits(reload(tmp_path), IDS)
    torch.testing.assert_close(decoder_logits(decoder, IDS), expected, atol=1e-5, rtol=1e-4)


def test_tied_heads_that_differ_only_above_the_asked_precision_are_shared(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig, tie_word_embeddings=True)
    edit_weights(lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].bfloat16().float()}))
    assert load(tmp_path, torch.float32).lm_head is not None
    assert load(tmp_path, torch.bfloat16).lm_head is None


def test_untied_head_that_is_missing_is_an_error(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig)
    edit_weights(drop_head)
    with pytest.raises(ModelLoadError, match=r"1 missing: lm_head\.weight"):
        load(tmp_path)


def test_second_head_of_a_wrong_shape_is_an_error(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig, tie_word_embeddings=True)
    edit_weights(lambda tensors: tensors.update({HEAD: torch.zeros(299, 64)}))
    with pytest.raises(ModelLoadError, match=r"lm_head.weight \(expected \[300, 64\], found \[299"):
        load(tmp_path)


def test_base_model_names_without_prefix_are_understood(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    transformers_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    model = make_checkpoint(LlamaConfig, tie_word_embeddings=True)

    def strip_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_weights(strip_prefix)
    torch.testing.assert_close(
        decoder_logits(load(tmp_path), IDS), transformers_logits(model, IDS), atol=1e-5, rtol=1e-4
    )


def test_rotary_buffers_of_old_checkpoints_are_ignored(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig)
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_weights(lambda tensors: tensors.update(buffers))
    assert load(tmp_path).config.num_layers == 3


def test_missing_unexpected_and_misshapen_tensors_are_all_named_in_one_error(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[Q_PROJ]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.zeros(63)

    edit_weights(damage)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert f"1 missing: {Q_PROJ}" in message
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "1 misshapen: model.norm.weight (expected [64], found [63])" in message
    assert str(tmp_path) in message


def test_long_lists_of_tensors_are_cut_and_counted(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig)
    edit_weights(lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(14)}))
    with pytest.raises(ModelLoadError, match=r"14 unexpected: .* and 4 more"):
        load(tmp_path)


def test_a_key_norm_must_have_its_own_shape_although_it_is_spread_over_heads(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    make_checkpoint(Qwen3Config, head_dim=16)
    name = "model.layers.0.self_attn.k_norm.weight"
    edit_weights(lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(ModelLoadError, match=r"k_norm.weight \(expected \[16\], found \[1\]\)"):
        load(tmp_path)


@pytest.mark.parametrize("dtype, code", [(torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_packed_weights_are_refused_by_name(
    make_checkpoint: Callable[..., PreTrainedModel],
    edit_weights: Callable[..., None],
    load: Callable[..., Decoder],
    tmp_path: Path,
    dtype: torch.dtype,
    code: str,
) -> None:
    make_checkpoint(LlamaConfig)
    edit_weights(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(dtype)}))
    with pytest.raises(UnsupportedModelError, match=rf"q_proj\.weight \({code}\)"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_follow_the_seed_and_give_finite_logits(
    make_checkpoint: Callable[..., PreTrainedModel],
    decoder_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    make_checkpoint(Qwen3Config, attention_bias=True)
    config = load_decoder_config(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()

    def dummy(seed: int) -> Decoder:
        return load_decoder(
            config, tmp_path, dtype=dtype, device=CPU, load_format="dummy", seed=seed
        )

    logits = decoder_logits(dummy(1), IDS)
    assert logits.isfinite().all()
    assert logits.std() > 0.01
    assert torch.equal(logits, decoder_logits(dummy(1), IDS))
    assert not torch.equal(logits, decoder_logits(dummy(2), IDS))


def test_lowered_length_makes_a_shorter_table_and_leaves_the_numbers_alone(
    make_checkpoint: Callable[..., PreTrainedModel],
    load: Callable[..., Decoder],
    decoder_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    make_checkpoint(LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    full = load(tmp_path)
    config = replace(full.config, max_position_embeddings=200)
    short = load_decoder(config, tmp_path, dtype=torch.float32, device=CPU)
    assert (len(full.rotary_table), len(short.rotary_table)) == (512, 200)
    torch.testing.assert_close(short.rotary_table, full.rotary_table[:200], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        decoder_logits(short, IDS), decoder_logits(full, IDS), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "options, word",
    [
        ({"load_format": "pickle"}, "load_format .* 'pickle'"),
        ({"dtype": torch.int8}, "int8"),
        ({"dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
    ],
)
def test_wrong_options_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], word: str
) -> None:
    arguments = {"dtype": torch.float32, "device": CPU, **options}
    with pytest.raises(ConfigError, match=word):
        load_decoder(DecoderConfig.from_hf(LlamaConfig()), tmp_path, **arguments)

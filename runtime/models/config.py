"""DecoderConfig: everything that the decoder's numbers depend on, read from a transformers config.

A config option that changes the numbers and isn't implemented is refused by name: a model that
answers wrongly is worse than one that doesn't load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModelLoadError, UnsupportedModelError
from .rotary import RopeConfig, parse_rope

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SUPPORTED_ARCHITECTURES = tuple(_MODEL_TYPES)

# Options of relatives of these models, each with the values that leave the numbers alone; absent or
# null always does. What isn't listed here is metadata, or fails as an unexpected tensor.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "dual_chunk_attention_config": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "clip_qkv": (),
    "qk_layernorm": (False,),
}
_REMEDIES = {
    "quantization_config": "load a checkpoint of the model in float32, float16 or bfloat16"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape and options of one decoder-only model."""

    architecture: str
    """One of SUPPORTED_ARCHITECTURES."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the gated MLP."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads, a multiple of num_kv_heads."""
    num_kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head, even; needn't be hidden_size / num_heads."""
    rms_norm_eps: float
    """Added to the mean square in every RMSNorm."""
    windows: tuple[int | None, ...]
    """Per layer: a query at position p sees keys p - window + 1 .. p; None sees all before it."""
    qkv_bias: bool
    """Whether the query, key and value projections have a bias."""
    o_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    """Whether the MLP's three projections have a bias."""
    qk_norm: bool
    """Whether queries and keys are RMS-normalised per head before the rotary embedding."""
    tie_word_embeddings: bool
    """Whether the head shares the embedding's weight."""
    rope: RopeConfig
    """Rotary embedding."""
    max_position_embeddings: int
    """Usable length in tokens, with rotary scaling counted in. It is also the rows of the rotary
    table, so an engine that serves less may lower this field (`dataclasses.replace`)."""
    declared_dtype: torch.dtype | None
    """The config's `dtype` (older files: `torch_dtype`); None where it names none."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"model config: {name} must be an integer above 0: {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"model config: num_heads {self.num_heads} isn't a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2 or (self.rope.kind == "dynamic" and self.head_dim < 4):
            raise UnsupportedModelError(
                f"head_dim {self.head_dim} isn't supported: the rotary embedding "
                f"({self.rope.kind}) needs an even one, dynamic at least 4"
            )
        if not self.rms_norm_eps > 0:
            raise ModelLoadError(f"model config: rms_norm_eps must be above 0: {self.rms_norm_eps}")
        if len(self.windows) != self.num_layers:
            raise ModelLoadError(
                f"model config: {len(self.windows)} attention windows for {self.num_layers} layers"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelLoadError(f"model config: sliding_window must be above 0: {self.windows}")

    @classmethod
    def from_hf(cls, hf_config: PreTrainedConfig) -> DecoderConfig:
        """Read a transformers config object, with transformers' meaning of every field.

        Raises UnsupportedModelError for an architecture or option that isn't implemented, and
        ModelLoadError for a value that makes no sense.
        """
        architecture = _architecture(hf_config)
        _refuse_unimplemented(hf_config, architecture)
        rope = parse_rope(
            hf_config.rope_parameters,
            max_position_embeddings=hf_config.max_position_embeddings,
            original_max_position_embeddings=getattr(
                hf_config, "original_max_position_embeddings", None
            ),
        )
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        num_heads = hf_config.num_attention_heads
        return cls(
            architecture=architecture,
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads,
            rms_norm_eps=hf_config.rms_norm_eps,
            windows=_windows(hf_config, architecture),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(hf_config.tie_word_embeddings),
            rope=rope,
            max_position_embeddings=rope.extended_length(hf_config.max_position_embeddings),
            declared_dtype=_declared_dtype(hf_config),
        )


def load_decoder_config(path: Path) -> DecoderConfig:
    """DecoderConfig of the Hugging Face model directory `path`, from its config.json.

    Code that the directory may hold is never run. Raises ModelLoadError for a missing or malformed
    file, UnsupportedModelError as `DecoderConfig.from_hf` does.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file = path / "config.json"
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} can't be read as a model config: {error}") from error
    if not isinstance(stated, dict):
        raise ModelLoadError(f"{file} can't be read as a model config: it holds no JSON object")
    _check_architecture_names(stated.get("architectures"), stated.get("model_type"))
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ZeroDivisionError,
        StrictDataclassError,
    ) as error:
        raise ModelLoadError(f"{file} isn't a sound model config: {error}") from error
    _refuse_contradicting_rope(stated, hf_config.rope_parameters)
    return DecoderConfig.from_hf(hf_config)


def _architecture(hf_config: PreTrainedConfig) -> str:
    """The config's one architecture; a config object made in code names only its model type."""
    names = hf_config.architectures
    _check_architecture_names(names, hf_config.model_type)
    if names:
        return str(names[0])
    return next(name for name, kind in _MODEL_TYPES.items() if kind == hf_config.model_type)


def _check_architecture_names(names: Any, model_type: Any) -> None:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if names:
        unsupported = [str(name) for name in names if name not in _MODEL_TYPES]
        if unsupported or len(names) > 1:
            raise UnsupportedModelError(
                f"architecture {', '.join(map(str, names))} isn't supported; "
                f"a model needs exactly one of {supported}"
            )
        if _MODEL_TYPES[names[0]] != model_type:
            raise UnsupportedModelError(
                f"architecture {names[0]} with model_type {model_type!r} isn't supported: "
                f"it needs model_type {_MODEL_TYPES[names[0]]!r}"
            )
    elif model_type not in _MODEL_TYPES.values():
        raise UnsupportedModelError(
            f"model_type {model_type!r} isn't supported; supported architectures are {supported}"
        )


def _refuse_unimplemented(hf_config: PreTrainedConfig, architecture: str) -> None:
    if hf_config.hidden_act != "silu":
        raise UnsupportedModelError(
            f"hidden_act {hf_config.hidden_act!r} isn't implemented for {architecture}; 'silu' is"
        )
    neutral = dict(_NEUTRAL_VALUES)
    if architecture == "MistralForCausalLM":
        neutral["attention_bias"] = (False,)
    if architecture != "LlamaForCausalLM":
        neutral["mlp_bias"] = (False,)
    for name, values in neutral.items():
        value = getattr(hf_config, name, None)
        if value is not None and value not in values:
            remedy = _REMEDIES.get(name, "the model's numbers would be wrong without it")
            raise UnsupportedModelError(
                f"config option {name} = {value!r} isn't implemented for {architecture}: {remedy}"
            )
    if getattr(hf_config, "is_heterogeneous", False):
        raise UnsupportedModelError(
            "config option per_layer_config isn't implemented: all layers have one shape"
        )


def _windows(hf_config: PreTrainedConfig, architecture: str) -> tuple[int | None, ...]:
    """One attention window per layer, as the architecture's attention in transformers reads it."""
    window = getattr(hf_config, "sliding_window", None)
    types = getattr(hf_config, "layer_types", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    if types is None:
        types = [everywhere] * hf_config.num_hidden_layers
    allowed = {
        "LlamaForCausalLM": ("full_attention",),
        "MistralForCausalLM": (everywhere,),
    }.get(architecture, ("full_attention", "sliding_attention"))
    refused = sorted(set(types) - set(allowed))
    if refused:
        raise UnsupportedModelError(
            f"layer type {', '.join(refused)} isn't implemented for {architecture} with "
            f"sliding_window {window}; implemented: {', '.join(allowed)}"
        )
    if window is None and "sliding_attention" in types:
        raise ModelLoadError(
            "layer_types asks for sliding_attention, but there is no window: set sliding_window, "
            "and use_sliding_window to true"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _declared_dtype(hf_config: PreTrainedConfig) -> torch.dtype | None:
    dtype: Any = hf_config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype is None:
        return None
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2:
        return dtype
    raise UnsupportedModelError(
        f"config dtype {dtype!r} isn't supported; weights are float32, float16, bfloat16 or float64"
    )


def _refuse_contradicting_rope(stated: dict[str, Any], resolved: dict[str, Any]) -> None:
    """Refuse rotary options that transformers drops, as it does when a file states them twice."""
    inner = stated.get("rope_parameters")
    options = {**inner} if isinstance(inner, dict) else {}
    if stated.get("rope_theta") is not None:
        options["rope_theta"] = stated["rope_theta"]
    for name, value in options.items():
        if resolved.get(name) != value:
            raise ModelLoadError(
                f"config.json states the rotary option {name} twice, {value!r} and "
                f"{resolved.get(name)!r}: keep one of rope_parameters, rope_scaling and rope_theta"
            )

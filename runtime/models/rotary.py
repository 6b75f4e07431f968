"""Rotary position embedding: its parameters, its frequencies, its table and its application.

Rotate-half form (arXiv:2104.09864, in the pairing of GPT-NeoX: dimension i turns with dimension
i + head_dim / 2). Context is extended by kind linear (position interpolation, arXiv:2306.15595),
dynamic (a base that grows with the length, "NTK-aware"), yarn (arXiv:2309.00071) or llama3 (the
smoothed interpolation of Llama 3.1). Frequencies are computed in float32 in the order in which
transformers computes them: at position 10,000 one rounding step of a frequency turns a head by up
to 0.0006 radian, far above the rounding of everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")

# Every key that one of the kinds reads. transformers passes over a key of another kind, and so does
# this module; a key that no kind reads belongs to a variant that isn't implemented.
_KNOWN_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
        "high_freq_factor",
        "finetuned",  # a remark of early YaRN checkpoints, without effect
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary embedding, all decided; those of other kinds keep their defaults."""

    kind: str = "default"
    """One of ROPE_KINDS."""
    theta: float = 10_000.0
    """Base of the frequencies theta ** (-2i / head_dim)."""
    original_max_position: int
    """Length in tokens that the model was trained at before its context was extended."""
    factor: float = 1.0
    """How many times longer the extended context is (linear, dynamic, yarn, llama3)."""
    attention_factor: float = 1.0
    """Multiplies cos and sin, and so scores by its square (yarn)."""
    beta_fast: float = 32.0
    """Pairs turning more often than this within the original length keep their frequency (yarn)."""
    beta_slow: float = 1.0
    """Pairs turning less often than this within the original length are interpolated (yarn)."""
    truncate: bool = True
    """Whether the border dimensions between the two are rounded outwards (yarn)."""
    low_freq_factor: float = 1.0
    """Wavelengths above original length / this are interpolated (llama3)."""
    high_freq_factor: float = 4.0
    """Wavelengths below original length / this are kept (llama3)."""

    def extended_length(self, max_position_embeddings: int) -> int:
        """Usable length in tokens of a model whose config states `max_position_embeddings`.

        linear and dynamic configs state the length before extension, llama3 configs the one after
        it, yarn configs either.
        """
        if self.kind in ("linear", "dynamic", "yarn"):
            extended = int(self.original_max_position * self.factor)
            return max(max_position_embeddings, extended)
        return max_position_embeddings


def parse_rope(
    parameters: Mapping[str, Any],
    *,
    max_position_embeddings: int,
    original_max_position_embeddings: int | None,
) -> RopeConfig:
    """RopeConfig from a transformers config's `rope_parameters`.

    `original_max_position_embeddings` is the config's top-level field of that name, which
    transformers prefers to the one in `parameters`. Raises UnsupportedModelError for a kind or key
    that isn't implemented and ModelLoadError for a value that is missing or makes no sense.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rotary kind {kind!r} isn't implemented; implemented are {', '.join(ROPE_KINDS)}"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"partial_rotary_factor {parameters['partial_rotary_factor']!r} isn't implemented: "
            "rotary embeddings turn whole heads (1.0)"
        )
    unknown = sorted(set(parameters) - _KNOWN_KEYS - {"partial_rotary_factor"})
    if unknown:
        raise UnsupportedModelError(
            f"rotary option {', '.join(map(repr, unknown))} (kind {kind!r}) isn't implemented"
        )
    common = {"kind": kind, "theta": _positive(parameters, "rope_theta")}
    if kind == "default":
        return RopeConfig(**common, original_max_position=max_position_embeddings)
    if kind in ("linear", "dynamic"):
        return RopeConfig(
            **common,
            original_max_position=max_position_embeddings,
            factor=_positive(parameters, "factor"),
        )
    original = (
        original_max_position_embeddings
        or parameters.get("original_max_position_embeddings")
        or max_position_embeddings
    )
    if not isinstance(original, int) or original < 1:
        raise ModelLoadError(
            f"original_max_position_embeddings must be an integer above 0, got {original!r}"
        )
    if kind == "llama3":
        return _parse_llama3(parameters, common, original)
    return _parse_yarn(parameters, common, original, max_position_embeddings)


def _parse_llama3(
    parameters: Mapping[str, Any], common: dict[str, Any], original: int
) -> RopeConfig:
    low = _positive(parameters, "low_freq_factor")
    high = _positive(parameters, "high_freq_factor")
    if high <= low:
        raise ModelLoadError(
            f"rotary option high_freq_factor must be above low_freq_factor, got {high} and {low}"
        )
    return RopeConfig(
        **common,
        original_max_position=original,
        factor=_positive(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _parse_yarn(
    parameters: Mapping[str, Any], common: dict[str, Any], original: int, stated_length: int
) -> RopeConfig:
    if parameters.get("factor") is None:
        factor = stated_length / original
    else:
        factor = _positive(parameters, "factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        attention_factor = _positive(parameters, "attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention_factor = magnitude(_positive(parameters, "mscale"))
        attention_factor /= magnitude(_positive(parameters, "mscale_all_dim"))
    else:
        attention_factor = magnitude(1.0)
    return RopeConfig(
        **common,
        original_max_position=original,
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=bool(parameters.get("truncate", True)),
    )


def _positive(parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelLoadError(f"rotary option {name} must be a number above 0, got {value!r}")
    return float(value)


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Angle per position of each dimension pair, [head_dim / 2] float32.

    Those of kind dynamic hold up to the original length only.
    """
    frequencies = 1.0 / _powers(rope.theta, head_dim, device)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, frequencies, head_dim)
    return frequencies


def _powers(base: float | Tensor, head_dim: int, device: torch.device) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return torch.pow(base, exponents)


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    interpolated = frequencies / rope.factor
    share_kept = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share_kept) * frequencies / rope.factor + share_kept * frequencies
    result = torch.where(
        wavelengths > rope.original_max_position / rope.low_freq_factor, interpolated, blended
    )
    return torch.where(
        wavelengths < rope.original_max_position / rope.high_freq_factor, frequencies, result
    )


def _yarn_frequencies(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    def dimension_turning(times: float) -> float:
        """The (fractional) pair that turns this many times within the original length."""
        period_ratio = rope.original_max_position / (times * 2 * math.pi)
        return head_dim * math.log(period_ratio) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=frequencies.device)
    share_kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    interpolated = 1.0 / (rope.factor * _powers(rope.theta, head_dim, frequencies.device))
    return interpolated * (1 - share_kept) + frequencies * share_kept


def rotary_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device
) -> Tensor:
    """cos | sin of every position, [num_positions, head_dim] float32 on `device`.

    Kind dynamic: row p uses the base for sequence length max(original_max_position, p + 1). A key
    is turned once, when it enters the cache, so its row may depend on its position only; this is
    also what transformers computes when it decodes token by token, and no result depends on how a
    prompt is cut into chunks. (Given a prompt longer than the original length, transformers turns
    all of it by the base for its whole length, which no cache can continue.)
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None]
    frequencies = inverse_frequencies(rope, head_dim, device)
    if rope.kind == "dynamic":
        frequencies = _dynamic_frequencies(rope, head_dim, positions)
    angles = positions * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor)


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Frequencies of each row of the table, [num_positions, head_dim / 2] float32."""
    lengths = positions + 1
    stretch = rope.factor * lengths / rope.original_max_position - (rope.factor - 1)
    bases = rope.theta * stretch ** (head_dim / (head_dim - 2))
    bases = torch.where(lengths > rope.original_max_position, bases, rope.theta)
    return 1.0 / _powers(bases, head_dim, positions.device)


class RotaryFactors(NamedTuple):
    """What turns the heads of a step's tokens, made once per forward and used by every layer."""

    cos: Tensor
    """[T, 1, head_dim], in the model's dtype."""
    signed_sin: Tensor
    """[T, 1, head_dim], in the model's dtype: -sin for the first half of a head, then sin."""


def gather_rotary(table: Tensor, positions: Tensor, dtype: torch.dtype) -> RotaryFactors:
    """Rows of `table` [num_positions, head_dim] at `positions` [T] int64."""
    cos, sin = table.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return RotaryFactors(
        cos=torch.cat((cos, cos), dim=-1), signed_sin=torch.cat((-sin, sin), dim=-1)
    )


def rotate(heads: Tensor, factors: RotaryFactors) -> Tensor:
    """`heads` [T, num_heads, head_dim] turned by their positions' angles."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return heads * factors.cos + swapped * factors.signed_sin

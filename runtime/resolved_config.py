"""Engine options with nothing left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from attention import AttentionSpec, FlashInferOptions
from graphs import GraphMode
from graphs.capture_sizes import CaptureLadders

from .scheduler_config import Policy

if TYPE_CHECKING:
    from .models import DecoderConfig

LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with every choice made. The fields mean the same."""

    model_path: Path
    """The local Hugging Face directory."""
    load_format: LoadFormat
    """As in EngineConfig."""
    dtype: torch.dtype
    """Of weights, activations and KV cache."""
    device: torch.device
    """Where the model runs."""
    max_model_len: int
    """Most tokens of one sequence."""
    max_num_seqs: int
    """Most sequences running at a time; at most the token budget."""
    max_num_batched_tokens: int
    """Token budget of a step."""
    max_prefill_chunk: int | None
    """Most prompt tokens of one sequence in a step; None: what the budget leaves."""
    block_size: int
    """Tokens of a KV block."""
    num_kv_blocks: int | None
    """As in EngineConfig; the pool itself is sized when the model is loaded."""
    kv_cache_bytes: int | None
    """As in EngineConfig."""
    gpu_memory_utilization: float
    """As in EngineConfig."""
    enable_prefix_caching: bool
    """As in EngineConfig."""
    policy: Policy
    """As in EngineConfig."""
    graph_mode: GraphMode
    """Which steps run under captured graphs."""
    ladders: CaptureLadders | None
    """Sizes to be captured, of full graphs and of piecewise ones; None: no graphs."""
    lazy_capture: bool
    """As in EngineConfig."""
    bucket_fitting: bool
    """As in EngineConfig."""
    compile: bool
    """Whether layers are compiled; a compiler was found then."""
    itl_target_ms: float | None
    """As in EngineConfig."""
    overlap_scheduling: bool
    """Whether a step is launched while the one before runs."""
    attention_backend: str
    """A backend's name, or "auto"."""
    flashinfer_options: FlashInferOptions | None
    """As in EngineConfig."""
    quantization: Quantization | None
    """As in EngineConfig."""
    max_logprobs: int
    """As in EngineConfig."""
    seed: int
    """As in EngineConfig."""
    nvtx: bool
    """Whether the stages of a step open NVTX ranges."""
    cache_dir: Path
    """Where converted models, built libraries and compiled layers are kept."""
    reasons: Mapping[str, str]
    """Why each option that was left open got its value."""

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of a sequence of max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)

    def attention_spec(self, decoder: DecoderConfig) -> AttentionSpec:
        """What the model's attention is, as the backends see it."""
        return AttentionSpec(
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            dtype=self.dtype,
            device=self.device,
            block_size=self.block_size,
            windows=decoder.windows,
            scale=decoder.head_dim**-0.5,
            max_num_seqs=self.max_num_seqs,
            max_num_tokens=self.max_num_batched_tokens,
        )

    def describe(self) -> str:
        """One line per option, with the reason where it was chosen here."""
        lines = []
        for field in dataclasses.fields(self):
            if field.name != "reasons":
                reason = self.reasons.get(field.name)
                value = getattr(self, field.name)
                lines.append(f"{field.name} = {value}" + (f"  ({reason})" if reason else ""))
        return "\n".join(lines)

"""Tiny random checkpoints made by transformers, and both ways to compute their logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.models import Decoder, load_decoder, load_decoder_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

TINY_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


class DenseAttention:
    """Causal attention of one sequence, all its tokens in the batch, in the steps of transformers'
    eager attention."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.windows = windows

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
        query, key, value = (heads.transpose(0, 1) for heads in (query, key, value))
        scores = query @ key.mT * query.shape[-1] ** -0.5
        rows = torch.arange(query.shape[1])
        distance = rows[:, None] - rows[None, :]
        hidden = distance < 0
        window = self.windows[layer]
        if window is not None:
            hidden |= distance >= window
        weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
        attended: torch.Tensor = weights @ value
        return attended.transpose(0, 1)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., PreTrainedModel]:
    """make(config_class, max_shard_size=..., **options): saves a tiny random model to tmp_path and
    returns it as transformers reloads it."""

    def make(
        config_class: type[PreTrainedConfig], *, max_shard_size: str = "1GB", **options: Any
    ) -> PreTrainedModel:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config_class(**{**TINY_SHAPE, **options}))
        with torch.no_grad():
            # Biases start at 0 and norm weights at 1, which would hide whether they are used.
            for name, parameter in model.named_parameters():
                spread = 0.3 if name.endswith(("bias", "norm.weight")) else 0.05
                parameter.add_(torch.randn_like(parameter) * spread)
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        return AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()

    return make


@pytest.fixture
def load() -> Callable[..., Decoder]:
    """load(path, dtype=float32): the decoder of a model directory, on the CPU."""

    def load_on_cpu(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
        config = load_decoder_config(path)
        return load_decoder(config, path, dtype=dtype, device=torch.device("cpu"))

    return load_on_cpu


@pytest.fixture
def decoder_logits() -> Callable[..., torch.Tensor]:
    """compute(decoder, input_ids, positions=None): logits [T, vocab] of one sequence."""

    @torch.no_grad()
    def compute(
        decoder: Decoder, input_ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = torch.arange(len(input_ids)) if positions is None else positions
        attend = DenseAttention(decoder.config.windows)
        return decoder.compute_logits(decoder(input_ids, positions, attend))

    return compute


@pytest.fixture
def transformers_logits() -> Callable[..., torch.Tensor]:
    """compute(model, input_ids, positions=None): the same from transformers, without a cache."""

    @torch.no_grad()
    def compute(
        model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = torch.arange(len(input_ids)) if positions is None else positions
        logits: torch.Tensor = model(
            input_ids[None],
            position_ids=positions[None],
            # Keeps transformers from taking a gap in the positions for a new sequence.
            attention_mask=torch.ones_like(input_ids)[None],
            use_cache=False,
        ).logits
        return logits[0].float()

    return compute

"""The model of an engine: its weights, and what runs between its attention calls."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from typing import Any

import torch

from graphs import ForwardModel

from .compiled_layers import CompiledLayers, compile_layers
from .errors import ConfigError
from .kv_memory import trim_host_memory
from .models import (
    DecoderConfig,
    DecoderWeights,
    NativeForward,
    Packing,
    pack_refusal,
    region_refusal,
)
from .resolved_config import ResolvedConfig

logger = logging.getLogger("stepgraph.runtime")


class LoadedModel:
    """Loads the weights, packed where that is possible, and chooses and prepares the regions.

    Args:
        config: the resolved options.
        decoder_config: the model's shape.
    """

    def __init__(self, config: ResolvedConfig, decoder_config: DecoderConfig) -> None:
        refusal = _packing_refusal(config)
        self.weights = DecoderWeights(
            # No position past max_model_len occurs, so the rotary table need not hold one.
            dataclasses.replace(decoder_config, max_position_embeddings=config.max_model_len),
            config.model_path,
            dtype=config.dtype,
            device=config.device,
            load_format=config.load_format,
            seed=config.seed,
            packing=None
            if refusal
            else Packing(int8=config.quantization == "int8", cache_dir=config.cache_dir),
        )
        self.decoder = self.weights.decoder
        self._layers = self._compile_layers(config)
        self.forward = self._choose_forward(refusal)
        """The decoder's forward, over compiled, native or plain regions."""
        if gc.get_count()[2] > gc.get_threshold()[2] // 2:
            # Python is soon to look through all objects, 0.15 seconds with transformers loaded.
            # Better now than while requests wait.
            gc.collect()
        trim_host_memory()  # loading left copies of weights, and the KV pool comes next

    @property
    def compilation(self) -> dict[str, Any]:
        """Whether layers are compiled, why not, and what compiling each region took."""
        return self._layers.as_dict()

    def _choose_forward(self, refusal: str | None) -> ForwardModel:
        if self._layers.regions is not None:
            return functools.partial(self.decoder, regions=self._layers.regions)
        refusal = refusal or region_refusal(self.decoder)
        logger.info("native regions: %s", "yes" if refusal is None else f"no, {refusal}")
        return NativeForward(self.decoder) if refusal is None else self.decoder

    def _compile_layers(self, config: ResolvedConfig) -> CompiledLayers:
        if not config.compile:
            return CompiledLayers(reason=config.reasons.get("compile"))
        return compile_layers(
            self.decoder, max_tokens=config.max_num_batched_tokens, cache_dir=config.cache_dir
        )


def _packing_refusal(config: ResolvedConfig) -> str | None:
    """Why the weights stay plain; None if they are packed."""
    refusal = pack_refusal(config.dtype, config.device, cache_dir=config.cache_dir)
    if refusal is not None and config.quantization is not None:
        raise ConfigError(f"quantization={config.quantization!r} can't be done: {refusal}")
    if refusal is not None and config.device.type == "cpu" and config.dtype == torch.bfloat16:
        logger.warning(
            "weights can't be packed for this CPU: %s. Steps will take several times as long",
            refusal,
        )
    packed = f"yes, in {config.quantization or 'bfloat16'}"
    logger.info("weights packed: %s", packed if refusal is None else f"no, {refusal}")
    return refusal

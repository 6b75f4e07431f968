"""The supported models: one decoder, its config, its weights."""

from .checkpoint import stored_dtype
from .config import SUPPORTED_ARCHITECTURES, DecoderConfig, load_decoder_config
from .decoder import PLAIN_REGIONS, Decoder, Regions
from .linear import pack_refusal
from .native_forward import NativeForward
from .native_region import region_refusal
from .packing import pack_decoder
from .rotary import RopeConfig
from .weights import DecoderWeights, Packing, load_decoder

__all__ = [
    "PLAIN_REGIONS",
    "SUPPORTED_ARCHITECTURES",
    "Decoder",
    "DecoderConfig",
    "DecoderWeights",
    "NativeForward",
    "Packing",
    "Regions",
    "RopeConfig",
    "load_decoder",
    "load_decoder_config",
    "pack_decoder",
    "pack_refusal",
    "region_refusal",
    "stored_dtype",
]

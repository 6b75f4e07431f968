"""Small decoders of every shape, with the same random bfloat16 weights each time."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from runtime.models import Decoder, DecoderConfig

CPU = torch.device("cpu")
SHAPES = {
    "llama": (LlamaConfig, {}),
    "biases everywhere": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "heads of 6": (LlamaConfig, {"head_dim": 6}),
    "heads of 80, one for keys": (Qwen3Config, {"head_dim": 80, "num_key_value_heads": 1}),
    "70 hidden": (
        LlamaConfig,
        {"hidden_size": 70, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "larger": (LlamaConfig, {"hidden_size": 192, "intermediate_size": 544, "head_dim": 48}),
}


def make_decoder(shape="llama", ternary=False, **options):
    """A random bfloat16 decoder, the same for the same arguments."""
    config_class, shape_options = SHAPES[shape]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "architectures": [config_class.__name__.replace("Config", "ForCausalLM")],
    }
    config = DecoderConfig.from_hf(config_class(**{**sizes, **shape_options, **options}))
    decoder = Decoder(config, dtype=torch.bfloat16, device=CPU)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif ternary:
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        else:
            parameter.normal_(0, 0.1, generator=generator)
    return decoder

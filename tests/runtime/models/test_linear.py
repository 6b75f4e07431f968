"""Prepacked weights: the same numbers as plain ones, only where the CPU can."""

from __future__ import annotations

import pytest
import torch

from runtime.models import load_decoder, load_decoder_config, prepack_refusal
from runtime.models.linear import linear, prepack

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    prepack_refusal(torch.bfloat16, CPU) is not None,
    reason=f"weights can't be prepacked: {prepack_refusal(torch.bfloat16, CPU)}",
)


def test_only_bfloat16_on_a_cpu_is_prepacked():
    assert "float32 is not bfloat16" in prepack_refusal(torch.float32, CPU)
    assert "cuda is not a CPU" in prepack_refusal(torch.bfloat16, torch.device("cuda"))


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 2, 17, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_prepacked_weight_gives_the_plain_ones_product(num_rows, has_bias):
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 96).bfloat16()
    weight = torch.randn(200, 96).bfloat16()
    bias = torch.randn(200).bfloat16() if has_bias else None
    torch.testing.assert_close(
        linear(x, prepack(weight), bias), linear(x, weight, bias), rtol=2**-7, atol=2**-6
    )


@needs_packing
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_prepacked_decoder_gives_the_plain_ones_logits(checkpoint, family):
    path = checkpoint(family)
    config = load_decoder_config(path)
    plain, packed = (load_decoder(config, path, dtype=torch.bfloat16, device=CPU) for _ in range(2))
    packed.prepack()
    assert all(layer.qkv_weight.is_mkldnn for layer in packed.layers)
    ids, positions = torch.arange(20, dtype=torch.int32), torch.arange(20)

    def logits(decoder):
        def attend(layer, query, key, value):
            return query.contiguous()

        with torch.inference_mode():
            return decoder.compute_logits(decoder(ids, positions, attend))

    expected = logits(plain)
    torch.testing.assert_close(
        logits(packed), expected, rtol=0, atol=0.03 * float(expected.abs().max())
    )

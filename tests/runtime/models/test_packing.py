"""Packing a whole decoder: one piece of memory, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from attention.huge_pages import HUGE_PAGE_BYTES
from runtime.models import (
    Packing,
    load_decoder,
    load_decoder_config,
    pack_decoder,
    pack_refusal,
)
from runtime.models.linear import PackedWeight

CPU = torch.device("cpu")
REFUSAL = pack_refusal(torch.bfloat16, CPU)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def load(path):
    return load_decoder(load_decoder_config(path), path, dtype=torch.bfloat16, device=CPU)


def packed_weights(decoder):
    for layer in decoder.layers:
        yield from (layer.qkv_weight, layer.o_weight, layer.gate_up_weight, layer.down_weight)
    yield decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head


def test_weights_lie_one_after_another_from_a_huge_page_on(checkpoint):
    decoder = load(checkpoint("llama"))
    pack_decoder(decoder)
    weights = list(packed_weights(decoder))
    assert all(isinstance(weight, PackedWeight) for weight in weights)
    address = weights[0].panels.data_ptr()
    assert address % HUGE_PAGE_BYTES == 0
    for weight in weights:
        assert weight.panels.data_ptr() == address
        address += weight.panels.nbytes


def test_plain_weights_are_freed(checkpoint):
    decoder = load(checkpoint("llama"))
    plain = [weakref.ref(weight) for weight in packed_weights(decoder)]
    pack_decoder(decoder)
    gc.collect()
    assert [reference() for reference in plain] == [None] * len(plain)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_embeddings_are_the_plain_ones_and_a_tied_head_is_not_kept_twice(checkpoint, family, int8):
    decoder, reference = load(checkpoint(family)), load(checkpoint(family))
    pack_decoder(decoder, int8=int8)
    is_one = reference.lm_head is None and not int8
    assert (decoder.lm_head is None) == is_one
    assert isinstance(decoder.embed_tokens, PackedWeight) == is_one
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([0, 31, 32, 299, 7], dtype=dtype)
        assert decoder.embed(ids).is_contiguous()
        assert torch.equal(decoder.embed(ids), reference.embed(ids))
    hidden = torch.randn(4, 64).bfloat16()
    expected, logits = reference.compute_logits(hidden), decoder.compute_logits(hidden)
    allowed = 0.05 * float(expected.abs().max()) if int8 else 2**-7
    torch.testing.assert_close(logits, expected, rtol=2**-7, atol=allowed)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("int8", [False, True])
def test_packing_while_loading_gives_the_same(checkpoint, family, int8, load_format):
    path = checkpoint(family)
    options = {"dtype": torch.bfloat16, "device": CPU, "load_format": load_format}
    config = load_decoder_config(path)
    whole = load_decoder(config, path, **options)
    pack_decoder(whole, int8=int8)
    streamed = load_decoder(config, path, **options, packing=Packing(int8=int8))
    assert dict(whole.named_parameters()).keys() == dict(streamed.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert torch.equal(streamed.get_parameter(name), parameter)
    for one, other in zip(packed_weights(whole), packed_weights(streamed), strict=True):
        assert torch.equal(one.panels, other.panels)
        assert int8 == (one.scales is not None)
        assert not int8 or torch.equal(one.scales, other.scales)


def test_size_and_share_of_huge_pages_are_logged(checkpoint, caplog):
    caplog.set_level(logging.INFO, logger="stepgraph.runtime")
    pack_decoder(load(checkpoint("llama")))
    assert "packed weights: 0.2 MB, of that in huge pages: " in caplog.text

"""Packing a whole decoder: one piece of memory, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from attention.huge_pages import HUGE_PAGE_BYTES
from runtime.models import load_decoder, load_decoder_config, pack_decoder, pack_refusal
from runtime.models.linear import PackedWeight

CPU = torch.device("cpu")
REFUSAL = pack_refusal(torch.bfloat16, CPU)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def load(path):
    return load_decoder(load_decoder_config(path), path, dtype=torch.bfloat16, device=CPU)


def packed_weights(decoder):
    for layer in decoder.layers:
        yield from (layer.qkv_weight, layer.o_weight, layer.gate_up_weight, layer.down_weight)
    yield decoder.lm_head


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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_embedding_stays_plain_whether_tied_or_not(checkpoint, family):
    decoder, reference = load(checkpoint(family)), load(checkpoint(family))
    pack_decoder(decoder)
    assert torch.equal(decoder.embed_tokens, reference.embed_tokens)
    hidden = torch.randn(4, 64).bfloat16()
    expected = reference.compute_logits(hidden)
    torch.testing.assert_close(decoder.compute_logits(hidden), expected, rtol=2**-7, atol=2**-7)


def test_size_and_share_of_huge_pages_are_logged(checkpoint, caplog):
    caplog.set_level(logging.INFO, logger="stepgraph.runtime")
    pack_decoder(load(checkpoint("llama")))
    assert "packed weights: 0.2 MB, of that in huge pages: " in caplog.text

"""Native regions: the plain ones' results, rounded where those round, for every family and size."""

from __future__ import annotations

import pytest
import torch

from attention.native_build import usable_levels
from graphs.host_graph import HostGraphPool
from runtime.models import (
    PLAIN_REGIONS,
    NativeForward,
    pack_decoder,
    pack_refusal,
    region_refusal,
)
from runtime.models.rotary import gather_rotary
from tests.runtime.models.random_decoders import CPU, SHAPES, make_decoder

REFUSAL = pack_refusal(torch.bfloat16, CPU)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

OWN_LEVELS = [level for level in usable_levels() if level != "amx"]
ROWS = [1, 2, 5, 13, 33, 70]


def packed_regions(level=None, int8=False, **options):
    decoder = make_decoder(**options)
    pack_decoder(decoder, int8=int8, level=level)
    assert region_refusal(decoder) is None
    return decoder, NativeForward(decoder).regions


def step(decoder, num_rows, dtype=torch.bfloat16):
    """Attention's result, a residual and rotary factors."""
    config = decoder.config
    generator = torch.Generator().manual_seed(num_rows)
    attended = torch.randn(num_rows, config.num_heads, config.head_dim, generator=generator)
    residual = torch.randn(num_rows, config.hidden_size, generator=generator) * 2
    positions = torch.arange(num_rows) * 3 % 128
    rotary = gather_rotary(decoder.rotary_table, positions, torch.bfloat16)
    rotary = type(rotary)(*(factor.to(dtype) for factor in rotary))
    return attended.bfloat16().to(dtype), residual.bfloat16().to(dtype), rotary


def between(decoder, regions, inputs):
    attended, residual, rotary = inputs
    return regions.between(decoder.layers[0], decoder.layers[1], attended, residual, rotary)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_results_are_as_near_to_exact_ones_as_the_plain_regions(shape, num_rows):
    plain = make_decoder(shape)
    exact = between(plain.double(), PLAIN_REGIONS, step(plain, num_rows, torch.float64))
    plain = make_decoder(shape)
    rounded = between(plain, PLAIN_REGIONS, step(plain, num_rows))
    decoder, regions = packed_regions(shape=shape)
    native = between(decoder, regions, step(decoder, num_rows))
    for name in native._fields:
        right, other, actual = (getattr(r, name).double() for r in (exact, rounded, native))
        assert actual.shape == right.shape
        error, allowed = (actual - right).abs(), (other - right).abs()
        assert error.mean() <= 1.2 * allowed.mean()
        assert error.max() <= 2 * allowed.max() + 2**-7 * right.abs().max()


@pytest.mark.parametrize("level", OWN_LEVELS)
@pytest.mark.parametrize("shape", ["biases everywhere", "qwen3"])
@torch.inference_mode()
def test_every_operator_rounds_where_the_plain_one_does(shape, level):
    """With weights of -1, 0 and 1 sums are nearly exact, so a rounding more, less or elsewhere
    would show in a good part of the results."""
    plain = make_decoder(shape, ternary=True)
    expected = between(plain, PLAIN_REGIONS, step(plain, 40))
    decoder, regions = packed_regions(level=level, shape=shape, ternary=True)
    native = between(decoder, regions, step(decoder, 40))
    for name in native._fields:
        right, actual = getattr(expected, name), getattr(native, name)
        assert (actual == right).double().mean() > 0.99
        torch.testing.assert_close(actual, right, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("num_rows", [1, 20, 40])
@pytest.mark.parametrize("shape", ["biases everywhere", "qwen3", "larger"])
@torch.inference_mode()
def test_int8_weights_give_what_they_give_operator_by_operator(shape, num_rows):
    decoder, regions = packed_regions(int8=True, shape=shape)
    inputs = step(decoder, num_rows)
    expected = between(decoder, PLAIN_REGIONS, inputs)
    for right, actual in zip(expected, between(decoder, regions, inputs), strict=True):
        assert (actual == right).double().mean() > 0.9
        torch.testing.assert_close(actual, right, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("level", OWN_LEVELS)
@torch.inference_mode()
def test_a_row_gives_the_same_alone_and_among_any_others(level, int8):
    decoder, regions = packed_regions(level=level, int8=int8, shape="larger")
    attended, residual, rotary = step(decoder, 70)
    batch = between(decoder, regions, (attended, residual, rotary))
    for first, last in ((0, 1), (3, 8), (20, 40), (69, 70)):
        rows = slice(first, last)
        part = type(rotary)(*(factor[rows] for factor in rotary))
        alone = between(decoder, regions, (attended[rows], residual[rows], part))
        for got, expected in zip(alone, batch, strict=True):
            assert torch.equal(got, expected[rows])


@pytest.mark.parametrize("num_threads", [2, 3])
@torch.inference_mode()
def test_results_are_the_same_for_any_number_of_threads(num_threads):
    decoder, regions = packed_regions(shape="larger")
    inputs = step(decoder, 50)
    expected = between(decoder, regions, inputs)
    torch.set_num_threads(num_threads)
    for _ in range(20):
        for got, right in zip(between(decoder, regions, inputs), expected, strict=True):
            assert torch.equal(got, right)


@torch.inference_mode()
def test_attentions_result_may_be_strided_and_nothing_given_is_changed():
    decoder, regions = packed_regions()
    attended, residual, rotary = step(decoder, 6)
    expected = between(decoder, regions, (attended, residual, rotary))
    wide = torch.cat([attended, attended], dim=1)[:, : attended.shape[1]]
    swapped = attended.transpose(0, 1).contiguous().transpose(0, 1)
    before = residual.clone()
    for strided in (wide, swapped):
        assert not strided.is_contiguous()
        for got, right in zip(
            between(decoder, regions, (strided, residual, rotary)), expected, strict=True
        ):
            assert torch.equal(got, right)
    assert torch.equal(residual, before)


def attend(layer, query, key, value):
    return (query + key.repeat_interleave(2, 1) - value.repeat_interleave(2, 1)) * 0.5


@pytest.mark.parametrize("shape", ["llama", "biases everywhere", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"num_hidden_layers": 1}, {"tie_word_embeddings": True}])
@torch.inference_mode()
def test_a_packed_decoder_gives_the_plain_ones_logits(shape, options):
    plain = make_decoder(shape, **options)
    packed, regions = packed_regions(shape=shape, **options)
    ids, positions = torch.arange(20, dtype=torch.int32), torch.arange(20)
    expected = plain.compute_logits(plain(ids, positions, attend))
    scale = float(expected.abs().max())
    for chosen in (None, regions):
        logits = packed.compute_logits(packed(ids, positions, attend, chosen))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, rtol=0, atol=0.03 * scale)


@pytest.mark.parametrize("num_rows", [1, 24])
@torch.inference_mode()
def test_a_captured_forward_replays_on_new_inputs(num_rows):
    decoder, regions = packed_regions(shape="qwen3")
    ids, positions = torch.zeros(num_rows, dtype=torch.int32), torch.zeros(num_rows).long()
    graph = HostGraphPool().new_graph()
    hidden = graph.capture(
        lambda ids, positions: decoder(ids, positions, attend, regions), (ids, positions)
    )
    for seed in range(3):
        torch.manual_seed(seed)
        ids.copy_(torch.randint(100, (num_rows,)))
        positions.copy_(torch.randint(128, (num_rows,)))
        graph.replay()
        assert torch.equal(hidden, decoder(ids, positions, attend, regions))


@torch.inference_mode()
def test_weights_rewritten_in_place_are_used():
    decoder, regions = packed_regions()
    inputs = step(decoder, 3)
    before = between(decoder, regions, inputs)
    decoder.layers[0].o_weight.panels.zero_()
    decoder.layers[0].down_weight.panels.zero_()
    after = between(decoder, regions, inputs)
    assert torch.equal(after.residual, inputs[1])
    assert not torch.equal(after.query, before.query)


def test_what_can_not_be_native_is_refused_with_the_reason():
    assert region_refusal(make_decoder()) == "the weights are not packed"
    for options, text in (
        ({"intermediate_size": 72}, "intermediate_size 72 is not a multiple of 32"),
        (
            {"hidden_size": 65, "num_attention_heads": 5},
            "hidden_size 65 is not a multiple of 2",
        ),
    ):
        decoder = make_decoder(**options, num_key_value_heads=1, head_dim=16)
        pack_decoder(decoder)
        assert region_refusal(decoder) == text
    decoder = make_decoder(num_attention_heads=1, num_key_value_heads=1, head_dim=6)
    pack_decoder(decoder)
    assert region_refusal(decoder) is None
    decoder = make_decoder(num_attention_heads=1, num_key_value_heads=1, head_dim=6)
    pack_decoder(decoder, int8=True)
    assert region_refusal(decoder) == "num_heads * head_dim 6 is not a multiple of 4"

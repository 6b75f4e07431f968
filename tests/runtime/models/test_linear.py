"""Packed weights: the plain ones' products within one rounding, at each level of instructions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attention.native_build import LEVELS, NativeBuildError, find_compiler, usable_levels
from graphs.host_graph import HostGraphPool
from runtime.models import pack_refusal
from runtime.models.linear import linear, linear_in_float, pack, packed_bytes

CPU = torch.device("cpu")
BFLOAT16 = torch.bfloat16
try:
    find_compiler()
except NativeBuildError as error:
    pytest.skip(str(error), allow_module_level=True)
if pack_refusal(BFLOAT16, CPU) is not None:
    pytest.skip(str(pack_refusal(BFLOAT16, CPU)), allow_module_level=True)

# The library that hands blocks to oneDNN's matrix kernel runs wherever that multiplies bfloat16.
RUNNABLE = [
    level.name
    for level in LEVELS
    if level.name in usable_levels() or (level.name == "amx" and "avx512_bf16" in usable_levels())
]
OPERATOR = torch.ops.stepgraph.packed_linear.default


def random_case(num_rows, num_inputs, num_outputs, has_bias):
    generator = torch.Generator().manual_seed(num_rows + num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator).bfloat16()
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    bias = torch.randn(num_outputs, generator=generator).bfloat16() if has_bias else None
    return x, weight, bias


def assert_right(actual, x, weight, bias):
    """Within one rounding to bfloat16 of the product in float64, and float32's sums' error."""
    assert actual.dtype == BFLOAT16
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact = exact + bias.double()
    spread = (x.double().abs() @ weight.double().abs().T) * 2**-20
    error = (actual.double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + spread).all())


def unpacked(packed, num_inputs):
    """The weight [out, in] that a packed one stands for, in float64."""
    rows = packed.panels.transpose(1, 2).flatten(2).flatten(0, 1).double()
    if packed.scales is not None:
        rows = rows * packed.scales.double()[:, None] * 2**24
    return rows[: packed.num_outputs, :num_inputs]


def in_fixed_point(x):
    """What products with int8 weights round rows to at levels that multiply bytes."""
    x = x.double()
    largest = x.abs().amax(dim=1, keepdim=True)
    scale = torch.exp2(largest.clamp(min=2.0**-100).log2().floor() - 14)
    return (x / scale).round().clamp(max=127 * 256 + 127) * scale


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 12, 13, 31, 32, 33, 100])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "has_bias"),
    [(64, 96, False), (63, 100, True), (1162, 100, True), (1, 1, True), (2, 33, False)],
)
def test_products_are_right(int8, level, num_rows, num_inputs, num_outputs, has_bias):
    x, weight, bias = random_case(num_rows, num_inputs, num_outputs, has_bias)
    packed = pack(weight, int8=int8, level=level)
    weight = unpacked(packed, num_inputs)
    actual = linear(x, packed, bias)
    assert actual.shape == (num_rows, num_outputs)
    if int8 and level == "avx512_bf16":
        x = in_fixed_point(x)
    assert_right(actual, x, weight, bias)


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("level", RUNNABLE)
def test_int8_products_of_all_sizes_keep_bfloat16s_digits(level, num_rows):
    """Values from 2**-80 to 2**80 in different rows, from 1 to 2**-12 of the largest in each."""
    x, weight, _ = random_case(num_rows, 192, 64, False)
    sizes = torch.linspace(-80, 80, num_rows).exp2() if num_rows > 1 else torch.ones(1)
    x = (x * sizes[:, None] * torch.exp2(-torch.arange(192) % 13)).bfloat16()
    x[:, 5] = x.abs().amax(dim=1) * 1.99  # all digits set, a result that doesn't round up
    packed = pack(weight, int8=True, level=level)
    exact = x.double() @ unpacked(packed, 192).T
    largest = x.double().abs().amax(dim=1, keepdim=True)
    error = (linear(x, packed).double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + largest * 2**-10).all())


@pytest.mark.parametrize("level", RUNNABLE)
def test_int8_products_of_zeros_are_zero_and_of_nan_and_infinity_not_finite(level):
    x, weight, _ = random_case(6, 64, 40, False)
    packed = pack(weight, int8=True, level=level)
    expected = linear(x, packed)
    x[1], x[2, 3], x[4, 60] = 0, float("nan"), float("-inf")
    actual = linear(x, packed)
    assert not actual[1].any()
    assert not actual[[2, 4]].isfinite().any()
    assert torch.equal(actual[[0, 3, 5]], expected[[0, 3, 5]])


def test_int8_is_the_nearest_of_127_steps_to_either_side():
    weight = torch.randn(40, 50).bfloat16()
    weight[3] = 0
    weight[5, 7] = -9.0
    packed = pack(weight, int8=True)
    steps = weight.double().abs().amax(dim=1) / 127
    assert packed.panels.abs().amax() == 127
    error = (unpacked(packed, 50) - weight.double()).abs()
    assert bool((error <= 0.5001 * steps[:, None]).all())
    assert unpacked(packed, 50)[5, 7] == pytest.approx(-9.0)
    assert packed_bytes(weight, int8=True) == packed.panels.numel() + 4 * packed.scales.numel()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_products_are_the_same_for_any_number_of_threads(num_threads):
    x, weight, _ = random_case(40, 576, 960, False)
    packed = pack(weight)
    expected = linear(x, packed)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(linear(x, packed), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("level", [level for level in RUNNABLE if level != "amx"])
def test_a_row_gives_the_same_alone_and_among_any_others(level, int8):
    x, weight, bias = random_case(130, 1164, 160, True)
    packed = pack(weight, int8=int8, level=level)
    batch = linear(x, packed, bias)
    for first, last in ((0, 1), (5, 7), (17, 30), (60, 100), (129, 130)):
        assert torch.equal(linear(x[first:last], packed, bias), batch[first:last])


@pytest.mark.parametrize("view", ["rows", "columns", "transposed", "slice of a projection"])
def test_strided_rows_are_read_right(view):
    x, weight, _ = random_case(64, 64, 96, False)
    strided = {
        "rows": x[::3],
        "columns": x.repeat_interleave(2, dim=1)[:, ::2],
        "transposed": x.T.contiguous().T,
        "slice of a projection": torch.cat([x, x, x], dim=1)[:, 64:128],
    }[view]
    assert not strided.is_contiguous()
    assert_right(linear(strided, pack(weight)), strided, weight, None)


@pytest.mark.parametrize("int8", [False, True])
def test_packing_takes_views_and_given_memory(int8):
    _, weight, _ = random_case(1, 50, 4300, False)
    memory = torch.full((packed_bytes(weight, int8=int8),), 255, dtype=torch.uint8)
    packed = pack(weight.T.contiguous().T, int8=int8, memory=memory)
    assert packed.panels.data_ptr() == memory.data_ptr()
    x = torch.randn(3, 50).bfloat16()
    assert torch.equal(linear(x, packed), linear(x, pack(weight, int8=int8)))


def test_each_weight_lies_where_the_layout_says():
    weight = torch.arange(40 * 6).view(40, 6).bfloat16()
    panels = pack(weight).panels
    assert panels.shape == (2, 3, 32, 2)
    for output, inputs in enumerate(weight):
        for index, value in enumerate(inputs):
            assert panels[output // 32, index // 2, output % 32, index % 2] == value
    assert not panels[1, :, 8:].any()


@pytest.mark.parametrize("int8", [False, True])
def test_a_weight_rewritten_in_place_is_the_new_one(int8):
    x, weight, _ = random_case(2, 64, 96, False)
    memory = torch.empty(packed_bytes(weight, int8=int8), dtype=torch.uint8)
    packed = pack(torch.zeros_like(weight), int8=int8, memory=memory)
    assert not linear(x, packed).any()
    pack(weight, int8=int8, memory=memory)
    assert_right(linear(x, packed), x, unpacked(packed, 64), None)


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_results_in_float_are_the_rounded_ones(level, int8, num_rows):
    x, weight, _ = random_case(num_rows, 64, 101, False)
    packed = pack(weight, int8=int8, level=level)
    assert torch.equal(linear_in_float(x, packed), linear(x, packed).float())
    assert torch.equal(linear_in_float(x, weight), F.linear(x, weight).float())


def test_no_rows_give_no_rows():
    assert linear(torch.empty(0, 64).bfloat16(), pack(torch.ones(96, 64).bfloat16())).shape == (
        *(0, 96),
    )


def test_infinities_and_nan_are_kept():
    weight = torch.eye(32, dtype=BFLOAT16)
    x = torch.zeros(2, 32, dtype=BFLOAT16)
    x[0, 3], x[1, 5] = float("inf"), float("nan")
    result = linear(x, pack(weight))
    assert torch.equal(result.isnan(), F.linear(x, weight).isnan())


def test_plain_weights_are_multiplied_by_torch():
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_only_bfloat16_on_a_cpu_is_packed():
    assert "float32 is not bfloat16" in pack_refusal(torch.float32, CPU)
    assert "cuda is not a CPU" in pack_refusal(BFLOAT16, torch.device("cuda"))


def test_without_a_compiler_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = pack_refusal(BFLOAT16, CPU, cache_dir=tmp_path)
    assert reason == "the C++ compiler that CXX names, 'no-such-compiler', was not found"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_operator_keeps_its_contract(has_bias, int8):
    x, weight, bias = random_case(5, 64, 100, has_bias)
    packed = pack(weight, int8=int8)
    for to_float in (False, True):
        arguments = (x, packed.panels, packed.scales, bias, *packed[2:], to_float)
        torch.library.opcheck(OPERATOR, arguments)


def test_it_is_one_call_of_compiled_code_for_any_number_of_rows():
    packed = pack(torch.randn(96, 64).bfloat16())

    def function(x):
        return linear(x * 2, packed).float() + 1

    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager")
    for num_rows in (9, 1, 40):
        x = torch.randn(num_rows, 64).bfloat16()
        assert torch.equal(compiled(x), function(x))


def test_a_captured_graph_multiplies_what_lies_in_its_inputs():
    packed = pack(torch.randn(96, 64).bfloat16())
    x = torch.randn(4, 64).bfloat16()
    graph = HostGraphPool().new_graph()
    result = graph.capture(lambda x: linear(x, packed), (x,))
    for _ in range(2):
        x.copy_(torch.randn(4, 64))
        graph.replay()
        assert torch.equal(result, linear(x, packed))

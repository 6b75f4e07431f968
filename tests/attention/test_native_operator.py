"""stepgraph::native_attention as an operator: its contract, and inside compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention import AttentionSpec
from attention.native_backend import NativeBackend
from attention.native_build import (
    ATTENTION_SOURCE,
    NativeBuildError,
    usable_levels,
    usable_library,
)

try:
    usable_library(ATTENTION_SOURCE, usable_levels()[0])
except NativeBuildError as error:
    pytest.skip(f"the native backend can't be built: {error}", allow_module_level=True)

MakeSpec = Callable[..., AttentionSpec]
MakeStep = Callable[..., Any]
HEADS_OUTERMOST = NativeBackend.heads_outermost


def operator_args(step: Any, layer: int = 0) -> tuple[Any, ...]:
    plan = NativeBackend(step.spec).plan(step.metadata)
    return (
        step.query,
        step.key,
        step.value,
        step.cache.keys[layer],
        step.cache.values[layer],
        plan.slot_mapping,
        plan.block_tables,
        plan.layers[layer],
        step.spec.scale,
        step.spec.windows[layer] or 0,
        usable_library(ATTENTION_SOURCE, usable_levels()[0]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operator_keeps_its_contract(
    make_spec: MakeSpec, make_step: MakeStep, dtype: torch.dtype
) -> None:
    """Schema, what it mutates, its fake, and its use under a compiler with dynamic shapes."""
    step = make_step(make_spec(dtype=dtype), [(1, 40), (9, 20)], padded_rows=2)
    for tensor in (*step.cache.keys, *step.cache.values):
        tensor.nan_to_num_(0)  # the checks compare mutated arguments, where NaN never equals
    torch.library.opcheck(torch.ops.stepgraph.native_attention.default, operator_args(step))


def test_operator_with_given_memory_keeps_its_contract_too(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    step = make_step(make_spec(dtype=torch.float32), [(1, 40), (9, 20)], padded_rows=2)
    for tensor in (*step.cache.keys, *step.cache.values):
        tensor.nan_to_num_(0)
    operator = torch.ops.stepgraph.native_attention.out
    out = torch.zeros(step.query.shape)
    torch.library.opcheck(operator, operator_args(step), {"out": out})


def test_compiled_layers_over_one_pool_equal_eager_ones(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    """Three layers, each with its own views of one allocation, at several token counts.

    The pool's shapes are static, as they are in a runtime. With symbolic ones Inductor was seen
    to lose the offsets of views that share an allocation.
    """
    spec = make_spec(num_heads=4, num_kv_heads=2, windows=(None, 7, None), dtype=torch.float32)
    operator = torch.ops.stepgraph.native_attention.default

    def three_layers(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        rest: tuple[Any, ...],
    ) -> torch.Tensor:
        hidden = query
        for layer in range(3):
            slots, tables, works, scale, windows, library = rest
            attended = operator(
                hidden * 0.5,
                key + layer,
                value * (layer + 1),
                keys[layer],
                values[layer],
                slots,
                tables,
                works[layer],
                scale,
                windows[layer],
                library,
            )
            hidden = hidden + attended
        return hidden

    compiled = torch.compile(three_layers, fullgraph=True)
    for pairs in ([(1, 40), (9, 20)], [(1, 3), (1, 77), (30, 0)], [(1, 18), (1, 5)]):
        results, caches = [], []
        for function in (three_layers, compiled):
            step = make_step(spec, pairs)
            plan = NativeBackend(spec).plan(step.metadata)
            for tensor in (*step.cache.keys, *step.cache.values):
                torch._dynamo.mark_static(tensor)
            windows = tuple(window or 0 for window in spec.windows)
            rest = (
                *(plan.slot_mapping, plan.block_tables, plan.layers),
                *(spec.scale, windows, usable_library(ATTENTION_SOURCE, usable_levels()[0])),
            )
            results.append(
                function(step.query, step.key, step.value, step.cache.keys, step.cache.values, rest)
            )
            caches.append(torch.stack([*step.cache.keys, *step.cache.values]))
        eager, other = results
        torch.testing.assert_close(other, eager, rtol=0, atol=1e-5)
        torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=1e-6, equal_nan=True)
        written = [bool((caches[0][layer] != caches[0][0]).any()) for layer in (1, 2)]
        assert all(written)

"""`run` into memory that the caller gives: the same result, in the same cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention import AttentionSpec, BoundAttention, rejected_backends, select_backend

MakeSpec = Callable[..., AttentionSpec]
MakeStep = Callable[..., Any]

STEPS = {
    "decode": ([(1, 9), (1, 40), (1, 0)], {}),
    "mixed": ([(1, 40), (9, 20), (5, 0)], {}),
    "padded": ([(1, 40), (9, 20)], {"padded_rows": 3, "padded_seqs": (1,)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", ["native", "torch"])
def test_given_memory_holds_the_result_and_is_returned(
    make_spec: MakeSpec, make_step: MakeStep, name: str, kind: str, dtype: torch.dtype
) -> None:
    spec = make_spec(dtype=dtype, windows=(None, 7))
    if name in rejected_backends(spec):
        pytest.skip("; ".join(rejected_backends(spec)[name]))
    pairs, options = STEPS[kind]
    results, caches = [], []
    for is_given in (False, True):
        step = make_step(spec, pairs, **options)
        backend = select_backend(name, spec)
        attend = BoundAttention(backend=backend, plan=backend.plan(step.metadata), cache=step.cache)
        for layer in range(2):
            out = torch.full(step.query.shape, torch.nan, dtype=dtype) if is_given else None
            result = attend(layer, step.query, step.key, step.value, out)
            assert out is None or result is out
            results.append(result)
        caches.append(torch.stack([*step.cache.keys, *step.cache.values]))
    assert all(torch.equal(a, b) for a, b in zip(results[:2], results[2:], strict=True))
    assert torch.equal(caches[0].nan_to_num(nan=9.0), caches[1].nan_to_num(nan=9.0))

"""In bfloat16 a prompt from the cache gives the same first token, up to a stated tolerance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime import LLM, SamplingParams

TOLERANCE = 0.02
"""Of the logits' own spread: bfloat16 keeps 8 bits, and a cached prompt is summed in another
order than a fresh one."""


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_first_logits_from_the_cache_are_near_the_cold_ones(checkpoint, monkeypatch, family):
    prompt = np.random.default_rng(2).integers(0, 256, 5 * 16 + 3).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    seen: list[torch.Tensor] = []
    with LLM(checkpoint(family), dtype="bfloat16", max_model_len=128) as llm:
        model = llm.engine._runner._model
        compute_logits = model.compute_logits

        def recorded(hidden):
            seen.append(compute_logits(hidden))
            return seen[-1]

        monkeypatch.setattr(model, "compute_logits", recorded)
        cached = [
            llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens for _ in range(3)
        ]
    assert cached == [0, 80, 80]
    cold, *warm = (logits[0] for logits in seen)
    allowed = TOLERANCE * float(cold.std())
    best, second = cold.topk(2).values.tolist()
    for logits in warm:
        assert float((logits - cold).abs().max()) <= allowed
        assert logits.argmax() == cold.argmax() or best - second <= 2 * allowed

"""transformers' greedy output, and the rule by which ours is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

TIE = 1e-4
"""Padded, chunked and batched float32 products differ by about 1e-6, so where the reference's two
best logits are nearer than this, either id is right, and what follows can't be compared."""


@dataclass(frozen=True)
class Reference:
    """One greedy continuation and how clear each of its choices was."""

    token_ids: list[int]
    gaps: list[float]


class Transformers:
    """The reference: one prompt at a time, float32."""

    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Reference:
        torch = self._torch
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            result = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = torch.cat(result.logits).topk(2, dim=-1).values
        return Reference(
            token_ids=result.sequences[0, ids.shape[1] :].tolist(),
            gaps=(top[:, 0] - top[:, 1]).tolist(),
        )


def count_ties(outputs: Sequence[Sequence[int]], references: Sequence[Reference]) -> int:
    """Assert equality token by token up to a tie; return how many sequences met one."""
    assert len(outputs) == len(references)
    ties = 0
    for index, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        output = list(output)
        if output == reference.token_ids:
            continue
        length = min(len(output), len(reference.token_ids))
        differing = [i for i in range(length) if output[i] != reference.token_ids[i]]
        at = differing[0] if differing else length
        assert differing, f"prompt {index}: {len(output)} ids, {len(reference.token_ids)} wanted"
        assert reference.gaps[at] < TIE, (
            f"prompt {index}, token {at}: {output[at]} in place of {reference.token_ids[at]}, "
            f"whose lead of {reference.gaps[at]:.2g} is clear"
        )
        ties += 1
    if ties:
        print(f"{ties} of {len(outputs)} sequences met a tie")
    return ties


@pytest.fixture(scope="session")
def transformers_reference() -> type[Transformers]:
    return Transformers


@pytest.fixture(scope="session")
def ties():
    return count_ties

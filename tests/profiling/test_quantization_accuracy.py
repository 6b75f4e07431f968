"""The accuracy comparison on a tiny model, from the command line to its lines."""

from __future__ import annotations

import json
import re
import sys

import pytest
import quantization_accuracy
import torch

from runtime.models import pack_refusal

REFUSAL = pack_refusal(torch.bfloat16, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def test_int8_is_compared_with_bfloat16(monkeypatch, capsys, tmp_path, checkpoint):
    path = tmp_path / "conversations.json"
    turns = [{"from": "human", "value": "What is a bee?"}, {"from": "gpt", "value": "An animal."}]
    path.write_text(json.dumps([{"conversations": turns}] * 3))
    command = ["quantization_accuracy.py", str(path), "--model", str(checkpoint("llama"))]
    options = ["--conversations", "3", "--prompt-tokens", "50", "--max-tokens", "6"]
    monkeypatch.setattr(sys, "argv", command + options)
    quantization_accuracy.main()
    perplexity, likeliest, greedy = capsys.readouterr().out.splitlines()
    found = re.fullmatch(
        r"perplexity of (\d+) tokens: bfloat16 ([\d.]+), int8 ([\d.]+) \(.*\)", perplexity
    )
    assert found
    count, plain, int8 = map(float, found.groups())
    assert 0 < count <= 3 * 49
    assert plain != int8
    assert int8 == pytest.approx(plain, rel=0.2)
    assert re.fullmatch(r"same likeliest token: [\d.]+%", likeliest)
    assert re.fullmatch(r"greedy answers equal to the end: .* of [\d.]+ tokens before", greedy)


def test_tokens_are_equal_up_to_the_first_that_differs():
    assert quantization_accuracy.num_equal([1, 2, 3], [1, 2, 4, 5]) == 2
    assert quantization_accuracy.num_equal([1, 2], [1, 2, 3]) == 2
    assert quantization_accuracy.num_equal([], [1]) == 0


def test_too_few_conversations_are_named(tmp_path):
    path = tmp_path / "few.json"
    path.write_text("[]")
    with pytest.raises(SystemExit, match="has only 0 conversations that fit, 5 are needed"):
        quantization_accuracy.conversations(path, 5)

"""The command line: what it prints, and how it refuses."""

from __future__ import annotations

import io
import json

import pytest
import torch

from runtime.cli import main
from runtime.models import Decoder


def test_generate_prints_prompt_and_text_then_the_speed(checkpoint, capsys):
    path = str(checkpoint("llama"))
    arguments = ["--model", path, "--max-tokens", "4", "--temperature", "0", "--dtype", "float32"]
    assert main(["generate", "abc", "xyz", *arguments]) == 0
    shown = capsys.readouterr()
    assert "abc" in shown.out
    assert "xyz" in shown.out
    assert "8 tokens" in shown.err
    assert "time to first token" in shown.err


def test_chat_answers_one_message_or_lines(checkpoint, capsys, monkeypatch):
    arguments = ["--model", str(checkpoint("llama")), "--max-tokens", "4", "--seed", "1"]
    assert main(["chat", "hello", *arguments]) == 0
    assert capsys.readouterr().err.count("tokens/s") == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    assert main(["chat", "--system", "be brief", *arguments]) == 0
    assert capsys.readouterr().err.count("tokens/s") == 2


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_statistics_are_written_where_they_are_asked_for(checkpoint, tmp_path, command, capsys):
    path = tmp_path / "stats.json"
    arguments = ["--model", str(checkpoint("llama")), "--max-tokens", "4", "--temperature", "0"]
    assert main([command, "hello", *arguments, "--stats", str(path)]) == 0
    stats = json.loads(path.read_text(encoding="utf-8"))
    assert stats["schema_version"] == 1
    assert stats["num_steps"] == 4
    assert main([command, "hello", *arguments, "--stats", str(tmp_path / "no" / "x.json")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_stop_strings_and_penalties_are_flags_too(checkpoint, capsys):
    arguments = ["generate", "abc", "--model", str(checkpoint("llama")), "--temperature", "0"]
    arguments += ["--max-tokens", "9", "--min-tokens", "2", "--repetition-penalty", "1.2"]
    assert main(arguments) == 0
    assert "[9 tokens" in capsys.readouterr().err
    stops = [flag for letter in map(chr, range(33, 127)) for flag in ("--stop", letter)]
    assert main([*arguments, *stops, "--stop", "\N{REPLACEMENT CHARACTER}"]) == 0
    assert "[3 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "a", "--model", "no such thing"], "no such thing"),
        (["generate", "a", "--temperature", "hot"], "temperature"),
        (["generate", "a", "--top-p", "7"], "top_p"),
        (["generate", "a", "--presence-penalty", "3"], "presence_penalty=3 "),
        (["chat", "a", "--stop", "b", "--stop", ""], "stop[1]='' is empty"),
    ],
)
def test_refusals_are_one_line(arguments, text, capsys):
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert text in shown
    assert shown.count("\n") == 1


def test_an_answer_that_fails_is_one_line_too(checkpoint, capsys, monkeypatch):
    def poisoned(self, hidden):
        return torch.full((len(hidden), 300), torch.nan)

    monkeypatch.setattr(Decoder, "compute_logits", poisoned)
    assert main(["chat", "hello", "--model", str(checkpoint("llama"))]) == 1
    shown = capsys.readouterr().err
    assert "NaN" in shown
    assert shown.count("\n") == 1


def test_env_shows_every_variable_with_value_and_source(capsys, monkeypatch):
    monkeypatch.setenv("STEPGRAPH_NVTX", "1")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "STEPGRAPH_NVTX = 1  (environment)" in shown
    assert "(default)" in shown
    monkeypatch.setenv("STEPGRAPH_NVTZ", "1")
    assert main(["env"]) == 1
    assert "did you mean STEPGRAPH_NVTX?" in capsys.readouterr().err


def test_backends_are_listed_with_the_reasons_against_them(checkpoint, capsys):
    assert main(["backends", "--model", str(checkpoint("llama")), "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(":")[0] for line in lines]
    assert names == ["flashinfer", "flash_attn", "native", "torch"]
    assert "flashinfer: device cpu is not a CUDA device; dtype torch.float32 is none of" in lines[0]
    assert lines[-1] == "torch: can run"

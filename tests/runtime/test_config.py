"""Options: refused by name, resolved once with the reason kept, explicit before environment."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from attention import FlashInferOptions
from runtime import ConfigError, EngineConfig
from runtime.model_source import cache_directory
from runtime.models import load_decoder_config, stored_dtype

PATH = Path("somewhere")


@pytest.fixture(scope="module")
def decoder(checkpoint):
    return load_decoder_config(checkpoint("llama"))


def resolve(decoder, *, environ=None, stored=None, **options):
    config = EngineConfig(model="m", device="cpu", **options)
    return config.resolve(decoder, PATH, stored, environ or {})


@pytest.mark.parametrize("block_size", [0, -16, 7, 24, 512, "16", 16.0, True])
def test_block_sizes_other_than_powers_of_two_up_to_256_are_refused(block_size):
    with pytest.raises((ConfigError, TypeError), match="block_size"):
        EngineConfig(model="m", block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 2, 16, 256, np.int64(32)])
def test_good_block_sizes_are_kept(decoder, block_size):
    assert EngineConfig(model="m", block_size=block_size).block_size == block_size
    assert resolve(decoder, block_size=block_size).block_size == block_size


@pytest.mark.parametrize(
    ("backend", "block_size", "reason"),
    [
        ("auto", 16, "the default"),
        ("torch", 16, "the default"),
        ("flash_attn", 256, "what attention backend flash_attn needs"),
    ],
)
def test_an_open_block_size_is_what_the_attention_backend_needs(
    decoder, backend, block_size, reason
):
    for source in ({"attention_backend": backend}, {"environ": {"STEPGRAPH_ATTENTION": backend}}):
        resolved = resolve(decoder, **source)
        assert resolved.block_size == block_size
        assert resolved.reasons["block_size"] == reason
        assert f"block_size = {block_size}  ({reason})" in resolved.describe()


def test_a_block_size_that_the_attention_backend_can_not_take_is_refused(decoder):
    with pytest.raises(
        ConfigError,
        match=r"block_size=16 is not a multiple of 256, as attention_backend='flash_attn' needs; "
        r"leave block_size open, or ask for 256",
    ):
        resolve(decoder, block_size=16, attention_backend="flash_attn")
    assert resolve(decoder, block_size=256, attention_backend="flash_attn").block_size == 256


def test_options_of_flashinfer_are_kept_and_nothing_else_is_taken_for_them(decoder):
    options = FlashInferOptions(prefill_kernel="fa3")
    assert resolve(decoder, flashinfer_options=options).flashinfer_options == options
    with pytest.raises(ConfigError, match=r"flashinfer_options='fa3' are not FlashInferOptions"):
        EngineConfig(model="m", flashinfer_options="fa3")


def test_the_cache_directory_is_the_environments_else_the_users(decoder, tmp_path):
    environ = {"STEPGRAPH_CACHE_DIR": str(tmp_path)}
    assert resolve(decoder, environ=environ).cache_dir == tmp_path
    assert resolve(decoder).cache_dir == cache_directory()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 is below 1"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5 is not a whole number"),
        ({"seed": "7"}, "seed='7' is not a whole number of 64 bits"),
        ({"seed": 2**64}, "seed=18446744073709551616 is not a whole number"),
        ({"num_kv_blocks": 2**63}, "num_kv_blocks=9223372036854775808 is above"),
        ({"seed": True}, "seed=True is not a whole number"),
        ({"tokenizer": 5}, "tokenizer=5 is not a text"),
        ({"device": ["cpu"]}, r"device=\['cpu'\] is not a text"),
        ({"attention_backend": ""}, "attention_backend='' is not a text"),
        ({"dtype": ["float32"]}, r"dtype=\['float32'\] is not one of auto,"),
        ({"max_model_len": "4k"}, "max_model_len='4k' is not a whole number"),
        ({"policy": "lifo"}, "policy='lifo' is not one of fcfs, priority, prefill_first"),
        ({"dtype": "int8"}, "dtype='int8' is not one of auto"),
        ({"load_format": "pickle"}, "load_format='pickle' is not one of auto, dummy"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1 is not True or False"),
        ({"nvtx": "on"}, "nvtx='on' is not True or False"),
        ({"compile": 1}, "compile=1 is not True or False"),
        ({"max_logprobs": -2}, "max_logprobs=-2 is not a whole number of at least 0, or -1"),
        ({"max_logprobs": None}, "max_logprobs=None is not a whole number"),
        ({"max_logprobs": True}, "max_logprobs=True is not a whole number"),
    ],
)
def test_wrong_values_are_named(options, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(model="m", **options)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "mps"])
def test_wrong_devices_are_named(decoder, device):
    with pytest.raises(ConfigError, match=f"device='{device}'"):
        EngineConfig(model="m", device=device).resolve(decoder, PATH, None, {})


def test_a_budget_below_the_number_of_decodes_is_refused(decoder):
    with pytest.raises(ConfigError, match=r"max_num_seqs=8 .* max_num_batched_tokens=4"):
        resolve(decoder, max_num_seqs=8, max_num_batched_tokens=4)
    assert resolve(decoder, max_num_batched_tokens=4).max_num_seqs == 4


def test_explicit_comes_before_environment_before_default(decoder):
    environ = {"STEPGRAPH_MAX_NUM_BATCHED_TOKENS": " 300 ", "STEPGRAPH_NVTX": "1"}
    assert resolve(decoder).max_num_batched_tokens == 512
    from_environ = resolve(decoder, environ=environ)
    assert (from_environ.max_num_batched_tokens, from_environ.nvtx) == (300, True)
    assert from_environ.reasons["max_num_batched_tokens"] == "STEPGRAPH_MAX_NUM_BATCHED_TOKENS"
    explicit = resolve(decoder, environ=environ, max_num_batched_tokens=9, nvtx=False)
    assert (explicit.max_num_batched_tokens, explicit.nvtx) == (9, False)


def test_a_variable_set_after_import_is_honoured(decoder, monkeypatch):
    monkeypatch.setenv("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "77")
    config = EngineConfig(model="m", device="cpu").resolve(decoder, PATH, None)
    assert config.max_num_batched_tokens == 77


def test_max_model_len_is_the_models_unless_less_is_asked(decoder):
    assert resolve(decoder).max_model_len == 2048
    assert resolve(decoder, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len=2049 exceeds the model's 2048"):
        resolve(decoder, max_model_len=2049)


@pytest.mark.parametrize(
    ("declared", "stored", "asked", "expected"),
    [
        ({"torch_dtype": "float16"}, "float32", "auto", torch.float16),
        ({"dtype": "bfloat16"}, "float32", "auto", torch.bfloat16),
        ({}, "float32", "auto", torch.float32),
        ({}, "float16", "auto", torch.float16),
        ({"dtype": "float32"}, "float32", "bfloat16", torch.bfloat16),
        ({}, None, "auto", torch.bfloat16),
    ],
)
def test_the_dtype_is_asked_else_declared_else_stored_else_bfloat16(
    checkpoint, tmp_path, declared, stored, asked, expected
):
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (path / "config.json").write_text(json.dumps(config | declared))
    stored_as = None
    if stored is not None:
        import safetensors.torch

        tensors = safetensors.torch.load_file(path / "model.safetensors")
        cast = {name: tensor.to(getattr(torch, stored)) for name, tensor in tensors.items()}
        safetensors.torch.save_file(cast, path / "model.safetensors", {"format": "pt"})
        stored_as = stored_dtype(path)
    resolved = resolve(load_decoder_config(path), stored=stored_as, dtype=asked)
    assert resolved.dtype == expected


def test_resolving_leaves_the_options_alone_and_describes_every_choice(decoder):
    config = EngineConfig(model="m", device="cpu")
    before = dataclasses.asdict(config)
    text = config.resolve(decoder, PATH, torch.float32, {}).describe()
    assert dataclasses.asdict(config) == before
    for field in dataclasses.fields(config.resolve(decoder, PATH, None, {})):
        assert field.name in text or field.name == "reasons"
    assert "max_num_batched_tokens = 512  (the default on cpu)" in text

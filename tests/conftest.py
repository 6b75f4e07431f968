"""Small checkpoints of every family, made once per run, and the rule for comparing ids."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers side by side have a core each; read when torch is first imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCAB_SIZE = 300
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "llama3_rope")


def _config(family: str):
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 257,
        "initializer_range": 0.2,
    }
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    if family == "llama":
        return transformers.LlamaConfig(**common)
    if family == "llama3_rope":
        return transformers.LlamaConfig(**common, rope_parameters=rope)
    if family == "mistral":
        return transformers.MistralConfig(**common, sliding_window=20)
    if family == "qwen2":
        return transformers.Qwen2Config(**common)
    return transformers.Qwen3Config(**common, head_dim=64 if family == "wide_heads" else 32)


def _save_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(path)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products only lose by being split; a test of a real model asks for more threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name to a random float32 checkpoint with a byte-level tokenizer.

    "wide_heads" is a Qwen3 too, with heads of a size that every kernel takes.

    Two layers, hidden 64, 4 heads of 2 KV heads, vocabulary 300 of which the tokenizer knows
    258. Biases and norm weights are random too, so that none can be left out unnoticed.
    """
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            import torch
            import transformers

            torch.manual_seed(sum(map(ord, family)))
            model = transformers.AutoModelForCausalLM.from_config(
                _config(family), dtype=torch.float32
            )
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(0, 0.2)
                    elif "norm" in name:
                        parameter.uniform_(0.7, 1.3)
            path = tmp_path_factory.mktemp(family)
            model.save_pretrained(path)
            _save_tokenizer(path)
            made[family] = path
        return made[family]

    return make


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run's tests keep compiled layers: each model is compiled once per token budget.

    Native libraries come from where other tests have them.
    """
    from attention.native_build import cache_directory

    directory, libraries = tmp_path_factory.mktemp("compiled"), cache_directory() / "native"
    libraries.mkdir(parents=True, exist_ok=True)
    (directory / "native").symlink_to(libraries)
    return directory


@pytest.fixture
def compiled_once(compile_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made by the test share compiled layers with other tests.

    A step that needs a compilation, or runs uncompiled for want of one, is an error.
    """
    from graphs import RegionCompiler
    from runtime import compiled_layers

    def fail(message: str) -> None:
        raise AssertionError(message)

    strict = functools.partial(RegionCompiler, on_recompilation=fail)
    monkeypatch.setattr(compiled_layers, "RegionCompiler", strict)
    monkeypatch.setenv("STEPGRAPH_CACHE_DIR", str(compile_cache))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded default model, fetched on first use."""
    from runtime.model_source import resolve_model

    return resolve_model("smollm2-135m-instruct")

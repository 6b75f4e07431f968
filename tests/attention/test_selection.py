from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention import (
    AttentionBackend,
    AttentionSpec,
    FlashInferOptions,
    backend_names,
    block_size_multiple,
    preferred_block_size,
    rejected_backends,
    select_backend,
    selection,
)
from attention.torch_backend import TorchBackend


class UnavailableBackend(TorchBackend):
    name = "unavailable"

    @classmethod
    def unsupported_reasons(
        cls, spec: AttentionSpec, *, cache_dir: Path | None = None
    ) -> list[str]:
        return ["its package is missing", f"head size {spec.head_dim} is too small"]


@pytest.fixture
def with_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry whose preferred backend can't run, as on a machine without its package."""
    loaders = {"unavailable": lambda: UnavailableBackend, "torch": lambda: TorchBackend}
    monkeypatch.setattr(selection, "_LOADERS", loaders)


def test_a_backend_is_selected_by_name(make_spec: Callable[..., AttentionSpec]) -> None:
    spec = make_spec()
    backend = select_backend("torch", spec)
    assert backend.name == "torch"
    assert backend.spec is spec


def test_an_unknown_name_is_refused_with_the_known_ones(
    make_spec: Callable[..., AttentionSpec],
) -> None:
    with pytest.raises(
        ValueError, match=r"unknown .* 'torhc'; .*auto, flashinfer, flash_attn, native, torch"
    ):
        select_backend("torhc", make_spec())


def test_flashinfer_takes_its_options_and_no_other_backend_does(
    make_spec: Callable[..., AttentionSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FlashInferOptions(ragged_prompts=True)
    monkeypatch.setattr(selection, "_LOADERS", {"torch": lambda: TorchBackend})
    for name in ("torch", "auto"):
        with pytest.raises(ValueError, match=r"'torch' doesn't take .*ragged_prompts=True"):
            select_backend(name, make_spec(), flashinfer_options=options)
    given = []

    class Recorder(TorchBackend):
        def __init__(
            self, spec: AttentionSpec, *, options: FlashInferOptions | None = None, **others: Path
        ) -> None:
            super().__init__(spec)
            given.append(options)

    monkeypatch.setattr(selection, "_LOADERS", {"flashinfer": lambda: Recorder})
    for name in ("flashinfer", "auto"):
        select_backend(name, make_spec(), flashinfer_options=options)
    select_backend("flashinfer", make_spec())
    assert given == [options, options, None]


@pytest.mark.usefixtures("with_unavailable")
def test_a_named_backend_that_can_not_run_is_refused_with_all_reasons(
    make_spec: Callable[..., AttentionSpec],
) -> None:
    with pytest.raises(
        ValueError, match=r"'unavailable' can't run here: its package is missing; head size 16"
    ):
        select_backend("unavailable", make_spec())


@pytest.mark.usefixtures("with_unavailable")
def test_auto_logs_its_choice_and_why_others_were_passed_over(
    make_spec: Callable[..., AttentionSpec], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="stepgraph.attention"):
        backend = select_backend("auto", make_spec())
    assert backend.name == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "attention backend: torch (auto); passed over: "
        "unavailable (its package is missing; head size 16 is too small)"
    )


def test_auto_takes_the_preferred_one_of_those_that_can_run(
    make_spec: Callable[..., AttentionSpec],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class PreferredBackend(TorchBackend):
        name = "preferred"

    loaders: dict[str, Callable[[], type[AttentionBackend]]] = {
        "preferred": lambda: PreferredBackend,
        "torch": lambda: TorchBackend,
    }
    monkeypatch.setattr(selection, "_LOADERS", loaders)
    with caplog.at_level(logging.INFO, logger="stepgraph.attention"):
        assert select_backend("auto", make_spec()).name == "preferred"
    assert "torch (can run, but preferred is preferred)" in caplog.text
    assert backend_names() == ("preferred", "torch")


def test_auto_raises_with_every_reason_when_nothing_can_run(
    make_spec: Callable[..., AttentionSpec],
) -> None:
    with pytest.raises(
        ValueError,
        match=r"no attention backend can run here\. .*native: dtype.*torch: dtype torch",
    ):
        select_backend("auto", make_spec(dtype=torch.int8))


@pytest.mark.usefixtures("with_unavailable")
def test_rejected_backends_maps_names_to_all_reasons(
    make_spec: Callable[..., AttentionSpec],
) -> None:
    assert rejected_backends(make_spec()) == {
        "unavailable": ["its package is missing", "head size 16 is too small"]
    }
    assert set(rejected_backends(make_spec(dtype=torch.int8))) == {"unavailable", "torch"}


def test_capped_scores_are_refused_by_backends_that_can_not_cap(
    make_spec: Callable[..., AttentionSpec],
) -> None:
    spec = dataclasses.replace(make_spec(dtype=torch.float32), soft_cap=30.0)
    rejected = rejected_backends(spec)
    assert rejected["native"] == rejected["torch"] == ["scores can't be capped"]
    assert "scores can't be capped" in rejected["flash_attn"]


class PagedBackend(TorchBackend):
    name = "paged"
    block_size_multiple = 256


@pytest.mark.parametrize(
    ("name", "preference", "expected"),
    [
        ("auto", (PagedBackend, TorchBackend), (256, "what attention backend paged needs")),
        ("auto", (TorchBackend, PagedBackend), (16, "the default")),
        ("auto", (UnavailableBackend, PagedBackend), (256, "what attention backend paged needs")),
        ("paged", (TorchBackend, PagedBackend), (256, "what attention backend paged needs")),
        ("torch", (PagedBackend, TorchBackend), (16, "the default")),
    ],
)
def test_the_preferred_block_size_is_that_of_the_backend_which_will_run(
    make_spec: Callable[..., AttentionSpec],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    preference: tuple[type[TorchBackend], ...],
    expected: tuple[int, str],
) -> None:
    loaders = {backend.name: (lambda backend=backend: backend) for backend in preference}
    monkeypatch.setattr(selection, "_LOADERS", loaders)
    assert preferred_block_size(name, make_spec()) == expected
    chosen = select_backend(name, make_spec(block_size=expected[0])).name
    assert (chosen == "paged") == (expected[0] == 256)


def test_a_backend_that_is_passed_over_does_not_choose_the_block_size(
    make_spec: Callable[..., AttentionSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unavailable(UnavailableBackend):
        block_size_multiple = 256

    loaders = {"unavailable": lambda: Unavailable, "torch": lambda: TorchBackend}
    monkeypatch.setattr(selection, "_LOADERS", loaders)
    assert preferred_block_size("auto", make_spec()) == (16, "the default")
    assert preferred_block_size("unavailable", make_spec())[0] == 256


def test_block_size_multiples_are_known_by_name() -> None:
    multiples = {name: block_size_multiple(name) for name in ("auto", "flash_attn", "torch")}
    assert multiples == {"auto": 1, "flash_attn": 256, "torch": 1}
    with pytest.raises(ValueError, match="unknown attention backend 'flash'"):
        block_size_multiple("flash")


def test_auto_warns_once_of_what_is_lost_when_a_cpu_kernel_can_not_be_built(
    make_spec: Callable[..., AttentionSpec],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unbuilt(UnavailableBackend):
        name = "native"

    loaders = {"native": lambda: Unbuilt, "torch": lambda: TorchBackend}
    monkeypatch.setattr(selection, "_LOADERS", loaders)
    with caplog.at_level(logging.INFO, logger="stepgraph.attention"):
        assert select_backend("auto", make_spec()).name == "torch"
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message == (
        "attention backend native can't run here: its package is missing; head size 16 is too "
        "small. Using torch: attention on this CPU will take several times as long"
    )


def test_importing_attention_starts_no_cuda_and_imports_no_vendor_or_upper_layer() -> None:
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import attention\n"
        "assert not torch.cuda.is_initialized()\n"
        "tops = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "others = {'flashinfer', 'flash_attn', 'triton', 'transformers', 'runtime', 'graphs'}\n"
        "assert not tops & others, tops & others\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)

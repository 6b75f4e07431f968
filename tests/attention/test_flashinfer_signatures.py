"""The backend's calls, and its stand-in, against the signatures of real flashinfer packages."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention.flashinfer_backend import FlashInferOptions
from attention.flashinfer_library import OLDEST, TOO_NEW, FlashInferLibrary, version_reasons
from tests.attention.flashinfer_double import make_backend_class, make_double
from tests.attention.flashinfer_signatures import METHODS, PRIVATE, read

ROOT = Path(__file__).parents[2]
PINNED = json.loads((ROOT / "tests/data/flashinfer_signatures.json").read_text(encoding="utf-8"))
VERSIONS = sorted(PINNED["versions"])
POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]


def signature(listed: list[list[str]]) -> inspect.Signature:
    """A signature that takes the same arguments as one that was read."""
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            name, getattr(inspect.Parameter, kind), default=default if default else empty
        )
        for name, kind, default in listed
    ]
    return inspect.Signature(parameters)


def record_calls(library: Any, calls: list[Call]) -> None:
    """Note all calls of the library's classes and of its fast planner."""

    def recorded(name: str, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, method, args, kwargs))
            return function(*args, **kwargs)

        call.__signature__ = inspect.signature(function)
        return call

    for name, methods in METHODS.items():
        cls = getattr(library, name)
        for method in methods:
            setattr(cls, method, recorded(name, method, getattr(cls, method)))
    library.fast_decode_plan = recorded("", "fast_decode_plan", library.fast_decode_plan)


@pytest.fixture
def calls(make_spec: Callable[..., Any], make_step: Callable[..., Any]) -> list[Call]:
    """Calls of every kind that the backend makes, graphs and experiments included."""
    made: list[Call] = []
    library = make_double()
    record_calls(library, made)
    mixed = make_step(make_spec(), [(1, 40), (9, 20)], num_decodes=1)
    fresh = make_step(make_spec(windows=(7,)), [(1, 40), (9, 0)], num_decodes=1)
    decodes = make_step(make_spec(), [(1, 40), (1, 20)], num_decodes=2)
    for step, options in (
        (mixed, {}),
        (mixed, {"mixed_kernel": True}),
        (fresh, {"ragged_prompts": True, "prefill_kernel": "fa3"}),
        (decodes, {}),
    ):
        backend = make_backend_class(library)(step.spec, options=FlashInferOptions(**options))
        step.run(0, backend=backend)
    captured = backend.capturable_plan(decodes.metadata)
    assert captured.refresh(decodes.metadata)
    decodes.run(0, captured.plan, backend)
    expected = {(name, method) for name, methods in METHODS.items() for method in methods}
    assert {(name, method) for name, method, _, _ in made} == expected | {("", "fast_decode_plan")}
    return made


def assert_calls_fit(calls: list[Call], found: dict[str, Any]) -> None:
    for name, method, args, kwargs in calls:
        listed = found[name][method] if name else found[method]
        signature(listed).bind(*args, **kwargs)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_fits_the_signatures_of_a_real_version(calls: list[Call], version: str) -> None:
    assert_calls_fit(calls, PINNED["versions"][version])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_takes_what_a_real_version_takes(version: str) -> None:
    """The same leading arguments, and a selection of the others by keyword, with the defaults."""
    real, double = PINNED["versions"][version], read(make_double())
    for name, methods in METHODS.items():
        for method in methods:
            listed = double[name][method]
            by_name = {p[0]: p for p in real[name][method]}
            leading = [p[0] for p in listed if p[1] in POSITIONAL]
            assert leading == [p[0] for p in real[name][method]][: len(leading)]
            for parameter, _, default in listed:
                assert by_name[parameter][2] == default, f"{name}.{method}: {parameter}"
    assert double["fast_decode_plan"] == real["fast_decode_plan"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_has_the_private_attributes_of_a_real_version(version: str) -> None:
    real, double = PINNED["versions"][version], read(make_double())
    name = "BatchDecodeWithPagedKVCacheWrapper"
    assert real[name]["private"] == double[name]["private"] == sorted(PRIVATE)
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        assert "_pin_memory_int_workspace_buffer" in real[name]["private"]


def test_the_pinned_versions_are_the_first_and_a_recent_one() -> None:
    for version in VERSIONS:
        assert version_reasons(FlashInferLibrary.of(make_double(version))) == []
    assert VERSIONS[0].startswith(".".join(map(str, OLDEST)))


def test_the_extra_installs_a_version_in_the_range() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest, too_new = (".".join(map(str, version)) for version in (OLDEST, TOO_NEW))
    assert f'"flashinfer-python>={oldest},<{too_new}"' in pyproject


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
def test_the_installed_package_is_as_the_pinned_one_and_takes_every_call(calls: list[Call]) -> None:
    import flashinfer

    found = read(flashinfer)
    assert found == PINNED["versions"].get(flashinfer.__version__, found)
    assert_calls_fit(calls, found)
    library = FlashInferLibrary.of(flashinfer)
    assert version_reasons(library) == []
    assert library.fast_decode_plan() is not None
    assert found["BatchDecodeWithPagedKVCacheWrapper"]["private"] == sorted(PRIVATE)

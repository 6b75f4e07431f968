"""The flash_attn backend against the naive reference: with doubles of both kernels' functions on
a CPU, and with the kernels themselves on a GPU."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from attention import AttentionSpec
from attention.flash_attn_backend import FlashAttnBackend
from attention.flash_attn_kernels import KernelMissingError, find_kernel
from tests.attention import flash_attn_doubles as doubles

MakeSpec = Callable[..., AttentionSpec]
MakeStep = Callable[..., Any]

BLOCK_SIZE = 256
DTYPES = (torch.float16, torch.bfloat16)
FORMS = ("package", "torch")
SNAPSHOT = Path(__file__).parents[1] / "data" / "flash_attn_signature.json"
REAL_VARLEN = varlen.varlen_attn

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """use(form): that form's double, and the other form absent."""

    def install(form: str) -> None:
        package = doubles.flash_attn_package() if form == "package" else None
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        if form == "torch":
            monkeypatch.setattr(varlen, "varlen_attn", doubles.varlen_attn)

    return install


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, use: Callable[[str], None]) -> str:
    """Each form in turn, as its double."""
    use(request.param)
    return str(request.param)


def flash_spec(make_spec: MakeSpec, **options: Any) -> AttentionSpec:
    return make_spec(**{"block_size": BLOCK_SIZE, "dtype": torch.bfloat16, **options})


def run(step: Any, layer: int = 0) -> torch.Tensor:
    result: torch.Tensor = step.run(layer, backend=FlashAttnBackend(step.spec))
    assert result.is_contiguous()
    return result


# Signatures


def parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found]


def test_torchs_double_has_the_installed_functions_signature() -> None:
    real = parameters(REAL_VARLEN)
    if "block_table" not in {name for name, *_ in real}:
        pytest.skip(f"varlen_attn of torch {torch.__version__} takes no block table")
    assert parameters(doubles.varlen_attn) == real


def recorded_parameters() -> list[tuple[Any, ...]]:
    recorded = json.loads(SNAPSHOT.read_text())["parameters"]
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    defaults = [entry[1] if len(entry) == 2 else none for entry in recorded]
    defaults = [tuple(value) if isinstance(value, list) else value for value in defaults]
    return [(name, kind, value) for (name, *_), value in zip(recorded, defaults, strict=True)]


def test_the_packages_double_has_the_recorded_signature() -> None:
    assert parameters(doubles.flash_attn_varlen_func) == recorded_parameters()


def test_the_installed_package_has_the_recorded_signature() -> None:
    flash_attn = pytest.importorskip("flash_attn", reason="flash_attn is not installed")
    assert parameters(flash_attn.flash_attn_varlen_func) == recorded_parameters()


# Equality


@pytest.mark.parametrize(("form_name", "dtype"), list(zip(FORMS, DTYPES, strict=True)))
def test_mixed_batches_equal_the_reference(
    make_grid_step: MakeStep,
    use: Callable[[str], None],
    grid_head_dim: int,
    grid_group: int,
    form_name: str,
    dtype: torch.dtype,
) -> None:
    use(form_name)
    step = make_grid_step(grid_head_dim, grid_group, dtype, BLOCK_SIZE)
    for layer in range(step.spec.num_layers):
        step.assert_right(run(step, layer), layer)


@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("num_decodes", [0, 3, 5])
@pytest.mark.usefixtures("form")
def test_decodes_before_chunks_equal_the_reference(
    make_spec: MakeSpec, make_step: MakeStep, num_decodes: int, num_heads: int
) -> None:
    """Some chunks have one row too; windows hide some, all and none of the context."""
    spec = flash_spec(make_spec, num_heads=num_heads, windows=(None, 5, 300, 5000))
    pairs = [(1, 260), (1, 7), (1, 700), (1, 255), (1, 0)]
    chunks = [(20, 245), (1, 30), (9, 0)] if num_decodes == 3 else []
    step = make_step(spec, pairs[: num_decodes or 5] + chunks, num_decodes=num_decodes)
    for layer in range(spec.num_layers):
        step.assert_right(run(step, layer), layer)


@pytest.mark.parametrize("padded_seqs", [(), (0,), (1, 1), (0, 3, 1)], ids=str)
@pytest.mark.parametrize("pairs", [[(1, 300), (1, 20)], [(1, 300), (7, 250)]], ids=str)
@pytest.mark.usefixtures("form")
def test_padding_gives_zeros_and_changes_no_other_row(
    make_spec: MakeSpec,
    make_step: MakeStep,
    pairs: list[tuple[int, int]],
    padded_seqs: tuple[int, ...],
) -> None:
    spec = flash_spec(make_spec)
    alone = make_step(spec, pairs)
    plain = run(alone)
    num_rows = len(plain)
    step = make_step(spec, pairs, padded_seqs=padded_seqs, padded_rows=3, unused_columns=2)
    for name in ("query", "key", "value"):
        getattr(step, name)[:num_rows] = getattr(alone, name)
        getattr(step, name)[num_rows:] = float("nan")
    result = run(step)
    assert torch.equal(result[:num_rows], plain)
    assert not result[num_rows:].any()
    assert len(result) == num_rows + sum(padded_seqs) + 3


@pytest.mark.usefixtures("form")
def test_step_of_padding_alone_gives_zeros(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(
        flash_spec(make_spec), [], padded_seqs=[1, 0, 1], padded_rows=2, tables=[[0]] * 3
    )
    result = run(step)
    assert result.shape == (4, 4, 16)
    assert not result.any()


@pytest.mark.usefixtures("form")
def test_slots_that_no_sequence_owns_are_not_written(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    step = make_step(flash_spec(make_spec), [(1, 255), (9, 300), (40, 0)], padded_rows=2)
    owned = step.owned_slots()
    step.assert_right(run(step))
    for tensor in (*step.cache.keys, *step.cache.values):
        assert bool(tensor[~owned].isnan().all())
        assert bool(tensor[owned].isfinite().all())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.usefixtures("form")
def test_a_sequence_reads_blocks_that_another_one_writes_in_the_same_step(
    make_spec: MakeSpec, make_step: MakeStep, order: tuple[int, ...]
) -> None:
    pairs = [(300, 0), (6, 256), (1, 256)]
    tables = [[5, 2], [5, 3], [5, 6]]
    spec = flash_spec(make_spec)
    step = make_step(spec, [pairs[i] for i in order], tables=[tables[i] for i in order])
    step.assert_right(run(step))


@pytest.mark.usefixtures("form")
def test_sequences_with_bad_values_leave_the_others_alone(
    make_spec: MakeSpec, make_step: MakeStep
) -> None:
    step = make_step(flash_spec(make_spec), [(1, 40), (1, 300), (5, 7)], num_decodes=2)
    step.query[1] = float("nan")
    step.value[1] = float("inf")
    result = run(step)
    assert not result[1].isfinite().any()
    assert bool(result[0].isfinite().all()) and bool(result[2:].isfinite().all())


@pytest.mark.usefixtures("form")
def test_scale_of_the_spec_is_applied(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(flash_spec(make_spec, scale=0.7), [(3, 300)])
    step.assert_right(run(step))


@pytest.mark.usefixtures("form")
def test_gradients_are_off(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(flash_spec(make_spec), [(3, 300)])
    step.query.requires_grad_()
    assert not run(step).requires_grad


# Plans


def test_decodes_and_the_rest_are_groups_of_their_own(
    make_spec: MakeSpec, make_step: MakeStep, use: Callable[[str], None]
) -> None:
    use("torch")
    step = make_step(flash_spec(make_spec), [(1, 260), (1, 7), (9, 300), (1, 3)], num_decodes=2)
    decodes, rest = FlashAttnBackend(step.spec).plan(step.metadata).groups
    assert (decodes.first_row, decodes.last_row, decodes.max_seqlen_q) == (0, 2, 1)
    assert (rest.first_row, rest.last_row, rest.max_seqlen_q) == (2, 12, 9)
    assert (decodes.max_seqlen_k, rest.max_seqlen_k) == (261, 309)
    assert rest.cu_seqlens_q.tolist() == [0, 9, 10]
    assert rest.cu_seqlens_k.tolist() == [0, 309, 313]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("contexts", [[500, 20], [1, 200]])
def test_contexts_that_contradict_rows_or_tables_are_a_bug(
    make_spec: MakeSpec, make_step: MakeStep, contexts: list[int]
) -> None:
    step = make_step(flash_spec(make_spec), [(5, 100), (5, 7)])
    step.metadata.context_lens_cpu[:] = contexts
    with pytest.raises(AssertionError, match="context"):
        FlashAttnBackend(step.spec).plan(step.metadata)


@pytest.mark.usefixtures("form")
def test_metadata_of_another_block_size_is_a_bug(make_spec: MakeSpec, make_step: MakeStep) -> None:
    step = make_step(make_spec(dtype=torch.bfloat16), [(1, 4)])
    with pytest.raises(AssertionError, match="blocks of 16, the backend for 256"):
        FlashAttnBackend(flash_spec(make_spec)).plan(step.metadata)


# Which kernel, and why not


def test_what_the_kernels_do_not_take_is_refused_with_every_reason(make_spec: MakeSpec) -> None:
    reasons = FlashAttnBackend.unsupported_reasons(make_spec(head_dim=300, scale=-1.0))
    assert reasons == [
        "device cpu is not a CUDA device",
        "dtype torch.float64 is none of torch.float16, torch.bfloat16",
        "head_dim 300 is not a multiple of 8 up to 256",
        "block_size 16 is not a multiple of 256 "
        "(left open, it becomes one where this backend is asked for)",
        "scale -1.0 is not positive",
    ]
    (reason,) = FlashAttnBackend.unsupported_reasons(flash_spec(make_spec, head_dim=12))[1:]
    assert reason == "head_dim 12 is not a multiple of 8 up to 256"


def test_the_package_is_preferred_and_the_choice_is_logged(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", doubles.flash_attn_package())
    monkeypatch.setattr(varlen, "varlen_attn", doubles.varlen_attn)
    with caplog.at_level(logging.INFO, logger="stepgraph.attention"):
        FlashAttnBackend(flash_spec(make_spec))
    assert caplog.messages == [
        "flash_attn backend: flash_attn 2.8.3.post2 (the package is installed)"
    ]


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (None, "the flash_attn package can't be imported"),
        (doubles.flash_attn_package("2.7.4"), "has version 2.7.4, not 2.8 or later"),
        (doubles.flash_attn_package("3.0.0"), "has version 3.0.0"),
        (types.ModuleType("flash_attn"), "has version unknown"),
    ],
)
def test_without_a_fitting_package_torch_is_taken_and_the_reason_logged(
    make_spec: MakeSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    package: types.ModuleType | None,
    reason: str,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(varlen, "varlen_attn", doubles.varlen_attn)
    with caplog.at_level(logging.INFO, logger="stepgraph.attention"):
        FlashAttnBackend(flash_spec(make_spec))
    (message,) = caplog.messages
    assert message.startswith(f"flash_attn backend: varlen_attn of torch {torch.__version__} (")
    assert reason in message


def test_without_any_kernel_both_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(query: torch.Tensor, seqused_k: torch.Tensor) -> None: ...

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    with pytest.raises(
        KernelMissingError,
        match=r"flash_attn package can't be.*, and varlen_attn of torch .* 2\.12",
    ):
        find_kernel()


# The kernels


@pytest.fixture(params=FORMS)
def real_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each form that is installed, itself."""
    if request.param == "package":
        pytest.importorskip("flash_attn", reason="flash_attn is not installed")
    else:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    return str(request.param)


@pytest.mark.gpu
@on_device
@pytest.mark.usefixtures("real_form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_equal_the_reference_on_mixed_batches(
    make_grid_step: MakeStep, grid_head_dim: int, grid_group: int, dtype: torch.dtype
) -> None:
    step = make_grid_step(grid_head_dim, grid_group, dtype, BLOCK_SIZE).to(torch.device("cuda", 0))
    assert FlashAttnBackend.unsupported_reasons(step.spec) == []
    for layer in range(step.spec.num_layers):
        step.assert_right(run(step, layer), layer)


@pytest.mark.gpu
@on_device
@pytest.mark.usefixtures("real_form")
@pytest.mark.parametrize("num_heads", [2, 8])
@pytest.mark.parametrize("num_seqs", [1, 3, 200])
def test_kernels_equal_the_reference_on_decodes_and_padding(
    make_spec: MakeSpec, make_step: MakeStep, num_seqs: int, num_heads: int
) -> None:
    """Few sequences are split over their keys, many are not; padded rows are NaN."""
    spec = flash_spec(make_spec, num_heads=num_heads, head_dim=64, windows=(None, 100))
    pairs = [(1, 37 * i % 3000) for i in range(1, num_seqs + 1)] + [(1, 2999), (33, 500)]
    step = make_step(
        spec, pairs, num_decodes=num_seqs + 1, padded_seqs=[1, 0, 2], padded_rows=5
    ).to(torch.device("cuda", 0))
    for tensor in (step.query, step.key, step.value):
        tensor[-8:] = float("nan")
    for layer in range(spec.num_layers):
        step.assert_right(run(step, layer), layer)

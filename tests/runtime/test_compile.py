"""Compiled layers compute what plain ones do, are warm before requests, and come back from disk."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from graphs import RegionCompiler
from runtime import LLM, EngineConfig, SamplingParams
from runtime.compiled_layers import compile_layers
from runtime.models import (
    Decoder,
    load_decoder,
    load_decoder_config,
    pack_decoder,
    pack_refusal,
)

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
DTYPES = [torch.float32, torch.bfloat16]
MAX_TOKENS = 32
PROMPTS = [[(11 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 7, 16, 33, 60, 90))]
CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present"),
        ),
    ),
]


def fail(message):
    raise AssertionError(message)


def forbidding(path):
    """A compiler to which a call that nothing fits is an error."""
    return RegionCompiler(cache_dir=path, on_recompilation=fail)


def tracing(path):
    """The same without Inductor, for what doesn't depend on the code that it makes."""
    if path is not None:
        (path / "kernel").write_text("code")
    return RegionCompiler(compile_graph=lambda graph, _: graph.forward, on_recompilation=fail)


def load(path, dtype, num_layers=2, device=CPU) -> Decoder:
    """A checkpoint's decoder, its layers repeated up to a number."""
    config = load_decoder_config(path)
    decoder = load_decoder(config, path, dtype=dtype, device=device)
    config = dataclasses.replace(
        config, num_layers=num_layers, windows=config.windows[:1] * num_layers
    )
    longer = Decoder(config, dtype=dtype, device=device)
    parameters = dict(decoder.named_parameters())
    for name, parameter in longer.named_parameters():
        parts = name.split(".")
        if parts[0] == "registered_layers":
            parts[1] = str(int(parts[1]) % 2)
        parameter.copy_(parameters[".".join(parts)])
    return longer


def pack(decoder):
    """As the engine does where it can, which is in bfloat16."""
    if pack_refusal(decoder.embed_tokens.dtype, decoder.norm.device) is None:
        pack_decoder(decoder)


def attend(layer, query, key, value):
    """Stands for attention: depends on all of its inputs."""
    queries_per_kv = query.shape[1] // key.shape[1]
    return query * key.repeat_interleave(queries_per_kv, 1).tanh() + value.repeat_interleave(
        queries_per_kv, 1
    )


def forward(decoder, num_tokens, regions=None):
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, 256, (num_tokens,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 2048, (num_tokens,), generator=generator)
    ids, positions = ids.to(decoder.norm.device), positions.to(decoder.norm.device)
    with torch.inference_mode():  # a batch's tensors are made outside of it
        return decoder(ids, positions, attend, regions)


def check_compilations(stats):
    assert set(stats["regions"]) == {"enter", "between", "leave"}
    for region in stats["regions"].values():
        assert (region["num_compilations"], region["num_recompilations"]) == (2, 0)


# -- how often ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_two_compilations_per_region_serve_forty_token_counts(
    checkpoint, tmp_path, device, family, dtype
):
    decoder = load(checkpoint(family), dtype, num_layers=4, device=torch.device(device))
    pack(decoder)
    layers = compile_layers(
        decoder, max_tokens=MAX_TOKENS, cache_dir=tmp_path, new_compiler=tracing
    )
    counts = [*range(1, 25), *range(27, 67, 4), 96, 128, 192, 288, 500, 512]  # widths among them
    assert len(set(counts)) == 40
    random.Random(0).shuffle(counts)
    for num_tokens in counts:
        result = forward(decoder, num_tokens, layers.regions)
        assert torch.equal(result, forward(decoder, num_tokens))
    check_compilations(layers.as_dict())


# -- what they compute --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_layers_are_as_near_to_the_exact_result_as_plain_ones(
    checkpoint, compile_cache, device, family, dtype
):
    """And as near to these as two ways of rounding can be."""
    decoder = load(checkpoint(family), dtype, num_layers=3, device=torch.device(device))
    exact = copy.deepcopy(decoder).double()
    pack(decoder)
    layers = compile_layers(
        decoder, max_tokens=MAX_TOKENS, cache_dir=compile_cache, new_compiler=forbidding
    )
    assert layers.reason is None
    for num_tokens in (1, 2, 7, 32, 33):
        wanted = forward(exact, num_tokens)
        plain = forward(decoder, num_tokens).double()
        compiled = forward(decoder, num_tokens, layers.regions).double()
        error = (plain - wanted).norm()
        assert error < 200 * torch.finfo(dtype).eps * wanted.norm()
        assert (compiled - wanted).norm() < 1.5 * error
        assert (compiled - plain).norm() < 2 * error
    check_compilations(layers.as_dict())


def run(path, **options):
    """Greedy and drawn ids of a call, twice, and the statistics."""
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True),
    ] * 3
    sizes = {"max_model_len": 128, "max_num_batched_tokens": MAX_TOKENS}
    with LLM(path, dtype="float32", **sizes, **{"device": "cpu", **options}) as llm:
        outputs = [output for _ in range(2) for output in llm.generate(PROMPTS, params, False)]
        llm.engine.check_integrity()
        weights = weakref.ref(llm.engine._runner._model.embed_tokens)
        stats = llm.engine.stats()
    gc.collect()
    assert weights() is None, "closing gives the weights back"
    return [output.outputs[0].token_ids for output in outputs], stats


def check_statistics(stats):
    assert stats["compile"]["enabled"]
    assert json.loads(json.dumps(stats)) == stats
    check_compilations(stats["compile"])


@pytest.mark.parametrize("device", DEVICES)
def test_the_engine_gives_the_same_tokens(checkpoint, compiled_once, caplog, device):
    options = {"device": device, "graph_mode": "none"}
    plain, stats = run(checkpoint("llama"), compile=False, **options)
    assert stats["compile"] == {"enabled": False, "reason": None, "regions": {}}
    with caplog.at_level("INFO", logger="stepgraph.runtime"):
        compiled, stats = run(checkpoint("llama"), compile=True, **options)
    assert compiled == plain
    check_statistics(stats)
    assert caplog.text.count("compiled layers: 6 compilations of 3 regions, ") == 1


@pytest.mark.parametrize("device", DEVICES)
def test_under_graphs_too(checkpoint, compiled_once, device):
    plain, _ = run(checkpoint("llama"), compile=False, graph_mode="none", device=device)
    graphs = {"graph_mode": "full_and_piecewise", "capture_sizes": "1,2,4,8,16,32"}
    compiled, stats = run(checkpoint("llama"), compile=True, device=device, **graphs)
    assert compiled == plain
    check_statistics(stats)
    assert (stats["falls"], stats["dropped"]) == ({}, {})


# -- where there is no compiler -----------------------------------------------------------------


def test_a_cpus_default_is_off_for_a_reason_that_the_statistics_give(checkpoint):
    _, stats = run(checkpoint("llama"))
    reason = "the default on cpu, where it gains a few percent at most"
    assert stats["compile"] == {"enabled": False, "reason": reason, "regions": {}}


def test_without_a_compiler_layers_run_plainly_and_one_warning_says_so(
    checkpoint, compiled_once, caplog, monkeypatch
):
    plain, _ = run(checkpoint("llama"))
    for variable, options in (("0", {"compile": True}), ("1", {})):
        caplog.clear()
        monkeypatch.setenv("STEPGRAPH_COMPILE", variable)
        with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
            ids, stats = run(checkpoint("llama"), **options)
        assert ids == plain
        assert not stats["compile"]["enabled"]
        assert "no-such-compiler" in stats["compile"]["reason"]
        (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert "layers can't be compiled and run uncompiled: no C++ compiler was found" in warning


def test_when_compiling_fails_layers_run_plainly_and_a_warning_says_so(
    checkpoint, tmp_path, caplog
):
    def broken(graph, inputs):
        raise OSError("Python.h is missing")

    layers = compile_layers(
        load(checkpoint("llama"), torch.float32),
        max_tokens=MAX_TOKENS,
        cache_dir=tmp_path,
        new_compiler=lambda path: RegionCompiler(compile_graph=broken),
    )
    assert "Python.h is missing" in layers.as_dict()["reason"]
    assert "Python.h is missing" in caplog.text
    assert not layers.as_dict()["enabled"]
    assert [path for path in tmp_path.rglob("*") if path.suffix != ".lock"] == [
        tmp_path / "compiled"
    ]


def test_when_torch_compiles_nothing_a_warning_says_so(checkpoint, tmp_path, caplog):
    with torch.compiler.set_stance("force_eager"):
        layers = compile_layers(
            load(checkpoint("llama"), torch.float32), max_tokens=MAX_TOKENS, cache_dir=tmp_path
        )
    assert "compiled nothing" in layers.as_dict()["reason"]
    assert "compiled nothing" in caplog.text


def test_the_option_comes_from_argument_environment_or_device(checkpoint):
    path = checkpoint("llama")
    decoder = load_decoder_config(path)

    def resolve(environ, **options):
        config = EngineConfig(model="m", device="cpu", **options)
        return config.resolve(decoder, path, torch.float32, environ)

    assert not resolve({}).compile
    assert "compile = False  (the default on cpu" in resolve({}).describe()
    assert resolve({"STEPGRAPH_COMPILE": "1"}).compile
    assert resolve({"STEPGRAPH_COMPILE": "1"}).reasons["compile"] == "STEPGRAPH_COMPILE"
    assert not resolve({"STEPGRAPH_COMPILE": "1"}, compile=False).compile
    assert resolve({"STEPGRAPH_COMPILE": "0"}, compile=True).compile
    assert resolve({"STEPGRAPH_CACHE_DIR": "/somewhere"}).cache_dir == Path("/somewhere")


# -- what is kept on disk -----------------------------------------------------------------------

AGAIN = """
import json, sys, torch
from runtime import LLM
torch.set_num_threads(1)
with LLM(sys.argv[1], dtype="float32", compile=True, max_model_len=128,
         max_num_batched_tokens=int(sys.argv[2])) as llm:
    print(json.dumps(llm.engine.stats()))
"""


def test_another_process_compiles_nothing(checkpoint, compiled_once):
    run(checkpoint("llama"), compile=True)
    command = [sys.executable, "-c", AGAIN, str(checkpoint("llama")), str(MAX_TOKENS)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    for region in json.loads(result.stdout)["compile"]["regions"].values():
        assert (region["num_compilations"], region["num_cache_hits"]) == (2, 2)


@pytest.fixture
def start(checkpoint, tmp_path):
    """Starts an engine's layers with a compiler that only keeps a file; tells where it did."""

    def start(*, family="llama", dtype=torch.float32, **changes):
        places = []

        def note(path):
            places.append(path)
            return tracing(path)

        options = {"max_tokens": MAX_TOKENS, "cache_dir": tmp_path, "new_compiler": note} | changes
        layers = compile_layers(load(checkpoint(family), dtype), **options)
        assert layers.reason is None
        (place,) = places
        return place

    return start


def kept(directory):
    (file,) = directory.glob("compiled/*/kernel")
    return file


def test_code_is_made_aside_and_then_taken_from_where_it_is_kept(start, tmp_path):
    assert start().name.endswith(".partial")
    assert start() == kept(tmp_path).parent


@pytest.mark.parametrize("damage", ["overwritten", "lost", "list overwritten"])
def test_damaged_code_is_made_anew(start, tmp_path, caplog, damage):
    start()
    kernel = kept(tmp_path)
    if damage == "overwritten":
        kernel.write_bytes(b"\xff" * 4)
    elif damage == "lost":
        kernel.unlink()
    else:
        (kernel.parent / "files.json").write_text("[")
    assert start().name.endswith(".partial")
    assert kept(tmp_path).read_text() == "code"
    assert "whose compiled code is damaged" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": MAX_TOKENS + 1}, {"family": "qwen2"}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_other_sizes_models_and_dtypes_are_kept_apart(start, tmp_path, change):
    start()
    assert start(**change).name.endswith(".partial")
    assert len(list(tmp_path.glob("compiled/*/kernel"))) == 2
    assert not start().name.endswith(".partial")


def test_what_another_version_of_torch_made_is_not_taken(start, monkeypatch):
    start()
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("99.1"))
    assert start().name.endswith(".partial")


def test_a_cache_that_cannot_be_written_costs_a_warning_only(start, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert start(cache_dir=tmp_path / "file") is None
    assert "compiled code can't be kept for the next start" in caplog.text

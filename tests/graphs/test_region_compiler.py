"""Regions are compiled twice and no more, serve all layers and token counts, and leave no trace."""

from __future__ import annotations

import gc
import os
import random
import weakref
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.host_graph import HostGraph, HostGraphPool
from graphs.region_compiler import MAX_RECOMPILATIONS, RegionCompiler, compiler_refusal

WIDTH = 8


class Factors(NamedTuple):
    scale: torch.Tensor  # [T, 1]
    shift: torch.Tensor  # [T, WIDTH]


class Layer(nn.Module):
    """As a decoder's: parameters of its own, and numbers that all layers share."""

    def __init__(self, *, bias: bool = True):
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False) if bias else None


def region(layer: Layer, next_layer: Layer, x: torch.Tensor, factors: Factors):
    hidden = F.silu(F.linear(x, layer.weight, layer.bias)) * factors.scale
    hidden = F.rms_norm(hidden, (WIDTH,), eps=layer.eps)
    return F.linear(hidden, next_layer.weight) + factors.shift, hidden


def run_plainly(graph, inputs):
    """Takes Inductor's place where only the number of compilations matters."""
    return graph.forward


def fail(message):
    raise AssertionError(message)


def inputs(num_tokens, dtype=torch.float32):
    def rows(width):
        return torch.randn(num_tokens, width, dtype=dtype)

    return rows(WIDTH), Factors(scale=rows(1), shift=rows(WIDTH))


def warm(layers, **options):
    """A compiler and its region, called with 64 tokens and with one."""
    compiler = RegionCompiler(**{"compile_graph": run_plainly, "on_recompilation": fail} | options)
    compiled = compiler.compile(region)
    for num_tokens in (64, 1):
        compiled(*layers[:2], *inputs(num_tokens))
    compiler.finish_warm_up()
    return compiler, compiled


@pytest.fixture
def layers():
    return [Layer() for _ in range(4)]


@torch.inference_mode()
def test_two_compilations_serve_forty_token_counts_and_all_layers(layers):
    compiler, compiled = warm(layers)
    counts = [1, 2, 3, 4, WIDTH, 63, 64, 65, *range(100, 1060, 30)]
    assert len(set(counts)) == 40
    random.Random(0).shuffle(counts)
    for num_tokens in counts:
        for layer, next_layer in pairwise(layers):
            args = (layer, next_layer, *inputs(num_tokens))
            for actual, expected in zip(compiled(*args), region(*args), strict=True):
                assert torch.equal(actual, expected)
    (statistics,) = compiler.statistics.values()
    assert (statistics.num_compilations, statistics.num_recompilations) == (2, 0)


@torch.inference_mode()
def test_one_row_may_have_any_stride(layers):
    _, compiled = warm(layers)
    x, factors = inputs(1)
    strided = torch.randn(1, WIDTH + 3)[:, :WIDTH]
    strided.copy_(x)
    assert strided.stride() != x.stride()
    args = (*layers[:2], strided, factors)
    assert torch.equal(compiled(*args)[0], region(*layers[:2], x, factors)[0])


@torch.inference_mode()
def test_a_call_that_nothing_fits_is_counted_reported_and_run_uncompiled(layers, caplog):
    compiler, compiled = warm(layers, on_recompilation=None)
    args = (*layers[:2], *inputs(7))
    odd = (Layer(bias=False), layers[1], *inputs(7))
    with caplog.at_level("WARNING", logger="stepgraph.graphs"):
        assert torch.equal(compiled(*odd)[0], region(*odd)[0])
    (message,) = [record.message for record in caplog.records if record.name == "stepgraph.graphs"]
    assert "nothing compiled fits a call of the region 'region', which ran unc" in message
    assert "bias" in message, "the guard that failed is named"
    statistics = compiler.statistics["region"]
    assert (statistics.num_compilations, statistics.num_recompilations) == (2, 1)
    assert torch.equal(compiled(*args)[0], region(*args)[0])
    assert statistics.num_recompilations == 1


@torch.inference_mode()
def test_after_several_such_calls_the_region_runs_plainly_for_good(layers):
    reports = []
    compiler, compiled = warm(layers, on_recompilation=reports.append)
    for number in range(MAX_RECOMPILATIONS + 3):
        layers[0].eps = layers[1].eps = 0.01 + number  # a constant of the code
        args = (*layers[:2], *inputs(7))
        assert torch.equal(compiled(*args)[0], region(*args)[0])
    assert len(reports) == compiler.statistics["region"].num_recompilations == MAX_RECOMPILATIONS


@torch.inference_mode()
def test_such_a_call_can_be_made_an_error(layers):
    _, compiled = warm(layers)
    with pytest.raises(AssertionError, match="nothing compiled fits"):
        compiled(Layer(bias=False), layers[1], *inputs(7))


@torch.inference_mode()
def test_compilers_in_one_process_share_nothing(layers):
    compilers = [warm(layers) for _ in range(6)]  # Dynamo's limit for one code object is 8
    for _, compiled in compilers:
        for num_tokens in (1, 5):
            compiled(*layers[2:], *inputs(num_tokens))
    assert [c.statistics["region"].num_compilations for c, _ in compilers] == [2] * 6


@torch.inference_mode()
def test_the_processes_own_settings_are_left_alone(layers):
    def settings():
        config = torch._dynamo.config
        return config.recompile_limit, config.automatic_dynamic_shapes, dict(os.environ)

    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=True):
        before = settings()
        compiler, _ = warm(layers)
        assert settings() == before
    assert compiler.statistics["region"].num_compilations == 2


@torch.inference_mode()
def test_compiled_code_and_parameters_are_freed(layers):
    made = []

    def keep_track(graph, inputs):
        made.append(weakref.ref(graph))
        return graph.forward

    compiler, compiled = warm(layers, compile_graph=keep_track)
    alive = [*made, weakref.ref(layers[0].weight), weakref.ref(compiler)]
    assert len(alive) == 4
    layers.clear()
    del compiler, compiled
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


@torch.inference_mode()
def test_in_a_host_graph_a_region_is_one_call_and_stays_compiled(layers):
    compiler, compiled = warm(layers)
    x, factors = inputs(6)
    graph = HostGraph(HostGraphPool())
    result, _ = graph.capture(
        lambda x, scale, shift: compiled(*layers[:2], x, Factors(scale, shift)), (x, *factors)
    )
    assert [call.name for call in graph.tape.calls] == ["region"]
    for _ in range(2):
        x.normal_()
        layers[0].weight.normal_()
        graph.replay()
        assert torch.equal(result, region(*layers[:2], x, factors)[0])
    assert compiler.statistics["region"].num_compilations == 2


@torch.inference_mode()
def test_inductors_code_is_kept_and_found_again(layers, tmp_path):
    environment = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR",)}
    for num_hits in (0, 2):
        compiler = RegionCompiler(cache_dir=tmp_path, on_recompilation=fail)
        compiled = compiler.compile(region)
        for num_tokens in (64, 1, 5):
            args = (*layers[:2], *inputs(num_tokens))
            torch.testing.assert_close(compiled(*args), region(*args), rtol=1e-5, atol=1e-5)
        statistics = compiler.statistics["region"]
        assert (statistics.num_compilations, statistics.num_cache_hits) == (2, num_hits)
        assert statistics.seconds > 0
    assert list(tmp_path.glob("**/*.so"))
    assert environment == {name: os.environ.get(name) for name in environment}


def test_without_a_compiler_the_reason_is_named():
    cpu = torch.device("cpu")
    assert compiler_refusal(cpu) is None
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "no-such-compiler" in compiler_refusal(cpu)
    with torch._dynamo.config.patch(disable=True):
        assert "switched off" in compiler_refusal(cpu)

"""Compiles the regions of a forward between attention calls, and counts how often it does.

A region is a function of modules and of tensors whose first dimension is the step's tokens. The
parameters of modules become inputs of the compiled code, so that it serves all layers. There are
two compilations: for one token, since torch.compile takes a size of 1 for a constant, and for more.
"""

from __future__ import annotations

import copyreg
import functools
import logging
import os
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch.utils import _pytree as pytree

from .host_tape import leaf

logger = logging.getLogger("stepgraph.graphs")

P = ParamSpec("P")
R = TypeVar("R")
GraphCompiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]

MAX_RECOMPILATIONS = 4
"""Unforeseen calls of a region after which it runs plainly for good."""

# The process's own settings, which may differ, hold again after each call.
_DYNAMO_SETTINGS = {
    # What is dynamic is said here, not learnt from other engines' shapes.
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "error_on_recompile": False,
    "recompile_limit": 8,
}


def compiler_refusal(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device; None if it can, as far as can be told early."""
    if torch._dynamo.config.disable:
        return "torch.compile is switched off (TORCHDYNAMO_DISABLE)"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "there is no triton that can compile for this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"no C++ compiler was found (install one, or name it in CXX): {error}"
    return None


def inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile one graph by Inductor. Results within a kernel stay in float32 until stored."""
    # Graphs are captured by this package; trees of CUDA graphs below it would get in the way.
    compiled: Callable[..., Any] = torch._inductor.compile(
        graph, inputs, options={"triton.cudagraphs": False}
    )
    return compiled


@dataclass(slots=True, kw_only=True)
class RegionStatistics:
    """What compiling one region took."""

    num_compilations: int = 0
    num_cache_hits: int = 0
    """Compilations whose result was found on disk."""
    seconds: float = 0.0
    """Of all compilations, without Dynamo's tracing."""
    num_recompilations: int = 0
    """Calls after the warm-up that nothing had been compiled for; they run uncompiled."""


class RegionCompiler:
    """Compiles the regions of one model.

        compiler = RegionCompiler(cache_dir=directory)
        region = compiler.compile(function)
        ...                                 # call each region with many tokens, and with one
        compiler.finish_warm_up()

    During the warm-up each new kind of call compiles. Afterwards none does, since a request would
    wait for seconds: a call that nothing fits is counted, reported and run uncompiled. Compiled
    code is freed with the compiler and its regions.

    Args:
        cache_dir: where compiled code is kept and found again; None: where Inductor keeps it.
        on_recompilation: told of each call that nothing fits; None: a warning is logged.
        compile_graph: compiles one graph.
    """

    def __init__(
        self,
        *,
        cache_dir: Path | None = None,
        on_recompilation: Callable[[str], None] | None = None,
        compile_graph: GraphCompiler = inductor,
    ) -> None:
        self._cache_dir = cache_dir
        self._on_recompilation = on_recompilation or logger.warning
        self._compile_graph = compile_graph
        self._backends: dict[str, _Backend] = {}

    @property
    def statistics(self) -> dict[str, RegionStatistics]:
        """Per region, by the function's name."""
        return {name: backend.statistics for name, backend in self._backends.items()}

    def compile(self, fn: Callable[P, R]) -> Callable[P, R]:
        """A compiled twin of a function; one call of any HostGraph that records it."""
        name = fn.__name__
        assert name not in self._backends, f"the region {name} is compiled already"
        backend = _Backend(self._compile_graph, self._cache_dir)
        self._backends[name] = backend
        copy, statistics = _own_copy(fn), backend.statistics
        compiled: Callable[..., R] = leaf(torch.compile(copy, fullgraph=True, backend=backend))
        # Dynamo's entries and the code refer to each other, unseen by the garbage collector.
        weakref.finalize(copy, reset_code, copy.__code__).atexit = False

        @functools.wraps(fn)
        def region(*args: P.args, **kwargs: P.kwargs) -> R:
            assert not kwargs, "a region takes positional arguments"
            if not backend.is_warm:
                with torch._dynamo.config.patch(_DYNAMO_SETTINGS):
                    _mark_tokens(args)
                    result = compiled(*map(_canonical, args))
                _failed_guards(copy)
                return result
            count = statistics.num_recompilations
            if count >= MAX_RECOMPILATIONS:
                return fn(*args, **kwargs)
            result = compiled(*map(_canonical, args))
            if statistics.num_recompilations > count:
                self._on_recompilation(
                    f"nothing compiled fits a call of the region {name!r}, which ran uncompiled: "
                    f"{_failed_guards(copy)}"
                )
            return result

        return region

    def finish_warm_up(self) -> None:
        """Compile nothing from now on."""
        for backend in self._backends.values():
            backend.is_warm = True


class _Backend:
    """What torch.compile hands each graph of one region to.

    Dynamo keeps it for as long as the process lives, so it refers to nothing large.
    """

    def __init__(self, compile_graph: GraphCompiler, cache_dir: Path | None) -> None:
        self._compile_graph = compile_graph
        self._cache_dir = cache_dir
        self.statistics = RegionStatistics()
        self.is_warm = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        statistics = self.statistics
        if self.is_warm:
            statistics.num_recompilations += 1
            return graph.forward
        start, hits = time.perf_counter(), _num_cache_hits()
        with _inductor_cache(self._cache_dir):
            compiled = self._compile_graph(graph, inputs)
        statistics.num_compilations += 1
        statistics.num_cache_hits += _num_cache_hits() > hits
        statistics.seconds += time.perf_counter() - start
        return compiled


def _own_copy(fn: Callable[P, R]) -> types.FunctionType:
    """The function with a code object of its own.

    Dynamo keeps what it compiles with the code object: shared ones would mix the entries of
    several engines, run into its limit, and keep them until the process ends.
    """
    assert isinstance(fn, types.FunctionType), f"{fn} is not a plain function"
    copy = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _canonical(value: Any) -> Any:
    """The same tensor; of one row, whose stride says nothing, guards would tell strides apart."""
    if isinstance(value, torch.Tensor) and value.shape[0] == 1 and value.is_contiguous():
        return value.view(value.shape)
    return value


def _mark_tokens(args: Any) -> None:
    """Say that the first dimension of all tensors is any number; of one token it is constant."""
    for value in pytree.tree_leaves(args):
        if isinstance(value, torch.Tensor) and value.shape[0] > 1:
            torch._dynamo.mark_dynamic(value, 0)


def _num_cache_hits() -> int:
    counters = torch._dynamo.utils.counters
    graphs, autograd = counters["inductor"], counters["aot_autograd"]
    return int(graphs["fxgraph_cache_hit"] + autograd["autograd_cache_hit"])


def _failed_guards(copy: types.FunctionType) -> str:
    """What Dynamo noted against each compiled variant, which would keep the code alive: taken."""
    notes = getattr(torch._dynamo.utils, "guard_failures", {}).pop(copy.__code__, [])
    reasons = [note.split("  # ")[0] for note in notes]
    return "; ".join(reasons) or "torch gives no reason"


@contextmanager
def _inductor_cache(directory: Path | None) -> Iterator[None]:
    """Let Inductor and Triton keep their files in `directory`, and find them from any program.

    Only the environment can say where, and both write what they chose into it. Inductor's keys hold
    pickled memory formats, in which pickle names the first imported module that has a `torch`.
    Everything is as before afterwards.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    if directory is None:
        os.environ.update(before)
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    reducers = copyreg.dispatch_table
    reducer = reducers.get(torch.memory_format)
    reducers[torch.memory_format] = lambda value: (_memory_format, (str(value),))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
        del reducers[torch.memory_format]
        if reducer is not None:
            reducers[torch.memory_format] = reducer


def _memory_format(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))

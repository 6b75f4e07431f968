"""Recording for HostGraph: a function's run as leaf calls on fixed memory.

Two modes watch the run. Recorder sees operators below autograd. Those that are composed of
others, in C++ or in Python, it records through to their leaves, since a Python kernel that
ran again at replay could read live state and so hide a stale plan. HostAccessGuard sees
functions above the dispatcher: reads by the host which leave no operator behind.

Kernels in Python that only call a library with their arguments are leaves all the same.

Under these modes torch.compile runs a function uncompiled, so a compiled region is recorded
operator by operator; wrapped in `leaf`, it stays compiled and is one call of the tape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from .graph import CaptureError
from .host_memory import Arena, ExternalTensor, frozen, storage_key

P = ParamSpec("P")
R = TypeVar("R")

_REMEDY = "; CUDA refuses it while a graph is captured. Do it before or after the graph"
_HOST_ACCESSES = {
    "torch.Tensor.tolist",
    "torch.Tensor.numpy",
    "torch.Tensor.__array__",
    "torch.Tensor.__dlpack__",
    "torch.Tensor.__repr__",
    "torch.Tensor.__format__",
    "torch.Tensor.cpu",
    "torch.Tensor.pin_memory",
}
_ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_STORAGE_CHANGES = {"aten::resize_", "aten::resize_as_", "aten::set_"}
# Their kernels in Python hand their arguments' memory to a library, and read nothing else.
_OPAQUE = {"stepgraph::native_attention"}
# Where kernels are looked for, in the dispatcher's order.
_KERNEL_KEYS = (
    "CPU",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeafCall:
    """One call of the tape: a kernel, what it is given, and where its results belong."""

    name: str
    fn: Callable[..., Any]
    operands: list[Any]  # flat; a tensor is its frozen view or an ExternalTensor
    structure: pytree.TreeSpec
    results: list[tuple[int, torch.Tensor]]  # place in the flat result, memory to fill

    def run(self) -> None:
        """Call the kernel and copy what it makes into the recorded memory."""
        values = [v.resolve() if isinstance(v, ExternalTensor) else v for v in self.operands]
        args, kwargs = pytree.tree_unflatten(values, self.structure)
        made = pytree.tree_leaves(self.fn(*args, **kwargs))
        for place, memory in self.results:
            memory.copy_(made[place])


class Tape:
    """The calls of one graph, and the arena storages that it uses."""

    def __init__(self) -> None:
        self.calls: list[LeafCall] = []
        self.made: set[int] = set()
        self.used: set[int] = set()

    def run(self) -> None:
        """Run all calls in order. A kernel's failure is reported with the operator's name."""
        for call in self.calls:
            try:
                call.run()
            except CaptureError:
                raise
            except (RuntimeError, IndexError, ValueError) as error:
                raise RuntimeError(f"replay of {call.name} failed: {error}") from error


class HostAccessGuard(TorchFunctionMode):
    """Refuses what reads tensors on the host, and knows which function is running."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = resolve_name(func) or str(func)
        if name in _HOST_ACCESSES:
            raise CaptureError(f"{name} reads a tensor on the host{_REMEDY}")
        self.running.append((name, args))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running.pop()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends every leaf operator that runs to a tape."""

    def __init__(self, tape: Tape, arena: Arena, guard: HostAccessGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._arena = arena
        self._guard = guard
        self._externals: dict[int, ExternalTensor] = {}  # keep their keys from being reused

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._refuse(func, args, kwargs)
        if _is_composed(func):
            with self._guard, self:
                return func.redispatch(
                    torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs
                )
        result = func(*args, **kwargs)
        if func._schema.name == "aten::lift_fresh":
            self._record_number(result)
        elif func._schema.name in _ALLOCATIONS:
            self._own(result)
        elif torch.Tag.inplace_view not in func.tags:
            self.record(_qualified_name(func), func, args, kwargs, result)
        return result

    def record(self, name: str, fn: Callable[..., Any], args: Any, kwargs: Any, made: Any) -> None:
        """Append one call that has run, unless it only made views."""
        operands, structure = pytree.tree_flatten((args, kwargs))
        known = {storage_key(v) for v in operands if isinstance(v, torch.Tensor)}
        made = pytree.tree_leaves(made)
        fresh: set[int] = set()  # several results may lie in one new storage
        results = []
        for place, tensor in enumerate(made):
            if not isinstance(tensor, torch.Tensor):
                continue
            key = storage_key(tensor)
            if key not in fresh:
                if key in known or key in self._arena or key in self._externals:
                    continue
                self._own(tensor)
                fresh.add(key)
            results.append((place, frozen(tensor)))
        if isinstance(fn, OpOverload) and not results and made and not fn._schema.is_mutable:
            return
        self._tape.calls.append(
            LeafCall(
                name=name,
                fn=fn,
                operands=[self._operand(v) for v in operands],
                structure=structure,
                results=results,
            )
        )

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = storage_key(value)
        if key in self._arena:
            self._tape.used.add(key)
            return frozen(value)
        if value.dim() == 0:
            # Kernels take a number as a tensor without dimensions that nobody else holds.
            return frozen(value)
        external = ExternalTensor(value)
        self._externals.setdefault(key, external)
        return external

    def _own(self, tensor: torch.Tensor) -> None:
        self._arena.add(tensor)
        self._tape.made.add(storage_key(tensor))

    def _record_number(self, tensor: torch.Tensor) -> None:
        """`x[i] = 3.0` makes a tensor of the number; a device fills it with a kernel."""
        self._own(tensor)
        fill = torch.ops.aten.fill_.Scalar
        operands, structure = pytree.tree_flatten(((frozen(tensor), tensor.item()), {}))
        self._tape.calls.append(
            LeafCall(name="fill_", fn=fill, operands=operands, structure=structure, results=[])
        )

    def _refuse(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        if func._schema.name in _STORAGE_CHANGES:
            raise CaptureError(f"{self._name(func)} changes a tensor's memory during a capture")
        if func._schema.name == "aten::lift_fresh" and not self._assigns_number():
            raise CaptureError(f"{self._name(func)} copies from the host's memory{_REMEDY}")
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureError(f"{self._name(func)} reads a tensor on the host{_REMEDY}")
        if torch.Tag.dynamic_output_shape in func.tags and _depends_on_data(func, args, kwargs):
            raise CaptureError(
                f"{self._name(func)} makes a tensor whose shape depends on data{_REMEDY}"
            )

    def _assigns_number(self) -> bool:
        if not self._guard.running:
            return False
        name, args = self._guard.running[-1]
        return name == "torch.Tensor.__setitem__" and isinstance(args[2], int | float | bool)

    def _name(self, func: OpOverload) -> str:
        running = [name for name, _ in self._guard.running if not name.startswith("aten.")]
        return f"{running[-1]} ({_qualified_name(func)})" if running else _qualified_name(func)


def leaf(fn: Callable[P, R]) -> Callable[P, R]:
    """Make fn one call of any HostGraph that records it; elsewhere it is just fn.

    For compiled functions and opaque kernels. A replay calls fn again, so it must read nothing
    but its arguments and tensors whose place is fixed, and allocate what it returns. Tensors
    that it reads besides its arguments are not checked.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        recorders = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder)]
        if not recorders:
            return fn(*args, **kwargs)
        with _pop_mode_temporarily(), _disable_current_modes():
            result = fn(*args, **kwargs)
            name = getattr(fn, "__qualname__", str(fn))
            recorders[-1].record(name, fn, args, kwargs, result)
        return result

    return call


def _qualified_name(func: OpOverload) -> str:
    return func.name()  # type: ignore[no-untyped-call,no-any-return]


@functools.cache
def _is_composed(func: OpOverload) -> bool:
    """Whether the kernel calls further operators that the tape should hold instead."""
    if func._schema.name in _OPAQUE:
        return False
    name = _qualified_name(func)
    for key in _KERNEL_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            in_python = f"{name.replace('::', '/')}/{key}" in torch.library._impls
            return in_python or key == "CompositeImplicitAutograd"
    return False


def _depends_on_data(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether an operator tagged with a dynamic shape really has one in this call."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name.startswith(("aten::index", "aten::_unsafe_index")):
        masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
        return bool(masks)
    return True

"""What the backend relies on in the flashinfer package, read from an installed version.

    PYTHONPATH=FOLDER python -m tests.attention.flashinfer_signatures

prints the entry of one version for tests/data/flashinfer_signatures.json, where FOLDER is what
`pip install --no-deps --target FOLDER flashinfer-python==VERSION` and the same for its
dependencies apache-tvm-ffi, packaging, nvidia-ml-py, requests and tqdm made.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from typing import Any

METHODS = {
    "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
    "BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
    "BatchPrefillWithRaggedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
    "BatchAttention": ("__init__", "plan", "run"),
}
PRIVATE = ("_plan_info", "_pin_memory_int_workspace_buffer", "_cached_module")
"""Attributes of wrappers that the backend, or fast_decode_plan on its behalf, touches."""


def parameters(function: Any) -> list[list[str]]:
    """Name, kind and default of each parameter, as text; the default is "" if there is none."""
    return [
        [p.name, p.kind.name, "" if p.default is p.empty else repr(p.default)]
        for p in inspect.signature(function).parameters.values()
    ]


def assigned_attributes(cls: type) -> set[str]:
    """Attributes of self that the class's methods assign."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def read(library: Any) -> dict[str, Any]:
    """The signatures of a package or of its stand-in, and the private attributes that are there."""
    found: dict[str, Any] = {"fast_decode_plan": parameters(library.fast_decode_plan)}
    for name, methods in METHODS.items():
        cls = getattr(library, name)
        entry: dict[str, Any] = {method: parameters(getattr(cls, method)) for method in methods}
        if hasattr(cls, "_plan_impl"):  # what plan() passes its keywords on to
            entry["plan"] = parameters(cls._plan_impl)
        if name.endswith("Wrapper"):
            assigned = set().union(*map(assigned_attributes, cls.__mro__[:-1]))
            entry["private"] = sorted(assigned & set(PRIVATE))
        found[name] = entry
    return found


if __name__ == "__main__":
    import flashinfer

    print(json.dumps({flashinfer.__version__: read(flashinfer)}))

"""The repository's rules as functions on source text: each lists what breaks it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("attention", "graphs", "runtime")
EDGES: Mapping[str, Collection[str]] = {
    "attention": (),
    "graphs": ("attention",),
    "runtime": ("attention", "graphs"),
    "profiling": PACKAGES,
}
"""Which of the project's folders each one may import, itself aside."""

KERNEL_LIBRARIES = ("flash_attn", "flashinfer", "triton")
EXAMPLES = "runtime/examples/"
"""Programs to copy: they import public names as their readers will."""

LOWER_LAYERS: Mapping[str, Collection[str]] = {
    "attention": ("torch", "numpy", *KERNEL_LIBRARIES),
    "graphs": ("torch", "numpy"),
}
"""What the layers below runtime may import from outside, the standard library aside."""

LAZY = (
    *(*KERNEL_LIBRARIES, "pynvml", "transformers", "gguf", "huggingface_hub"),
    *("prometheus_client", "llguidance"),
)
"""Slow or optional libraries: imported inside the function that needs them, or for types."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_TOTAL_LINES = 22_000
"""Of the three packages together, which must stay readable in a weekend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A Python file: its path below the repository's root, text and syntax tree."""

    path: str
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @property
    def folder(self) -> str:
        """The top-level folder."""
        return self.path.split("/")[0]

    @property
    def module(self) -> str:
        """Dotted name; of an __init__ file the package's."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def num_lines(self) -> int:
        """Lines, blank ones and comments included."""
        return len(self.text.splitlines())


def parse(path: str, text: str) -> Source:
    """A source from text, as if it stood at `path`."""
    return Source(path=path, text=text, tree=ast.parse(text))


def read_folder(root: Path, folder: str) -> list[Source]:
    """All Python files below a folder of the repository."""
    files = sorted((root / folder).rglob("*.py"))
    return [parse(f.relative_to(root).as_posix(), f.read_text(encoding="utf-8")) for f in files]


def violations(rule: Callable[[Source], Iterable[str]], sources: Iterable[Source]) -> list[str]:
    """What breaks one rule, as path:line message."""
    return [f"{source.path}:{found}" for source in sources for found in rule(source)]


# Imports


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name, made absolute: `from .a import b` in runtime/c.py is runtime.a.b."""

    name: str
    line: int
    is_relative: bool
    in_function: bool
    for_types: bool

    @property
    def top(self) -> str:
        """The top-level package it comes from."""
        return self.name.split(".")[0]


def imports(source: Source) -> Iterator[Import]:
    """All imports at any depth, those by `import_module("literal")` included."""
    package = source.module.split(".")
    if not source.path.endswith("/__init__.py"):
        package.pop()

    def walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        for name in _imported_names(node, package):
            yield Import(
                name=name,
                line=getattr(node, "lineno", 0),
                is_relative=isinstance(node, ast.ImportFrom) and node.level > 0,
                in_function=in_function,
                for_types=for_types,
            )
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded: list[ast.stmt] = []
        if isinstance(node, ast.If):
            condition = ast.unparse(node.test).removeprefix("typing.")
            guarded = node.body if condition == "TYPE_CHECKING" else []
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_function, for_types or child in guarded)

    yield from walk(source.tree, False, False)


def _imported_names(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        return [".".join([*base, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).split(".")[-1]
        return [str(node.args[0].value)] if called in ("import_module", "__import__") else []
    return []


def forbidden_edges(source: Source) -> Iterator[str]:
    """Imports against the layers, own modules by absolute name, others by relative name."""
    for item in imports(source):
        if item.is_relative:
            if item.top != source.folder:
                yield f"{item.line} relative import leaves {source.folder}: {item.name}"
        elif item.top == source.folder:
            if source.path.startswith(EXAMPLES) and item.name.count(".") == 1:
                continue
            yield f"{item.line} own package imported by its absolute name: {item.name}"
        elif item.top in (*EDGES, "tests") and item.top not in EDGES[source.folder]:
            yield f"{item.line} {source.folder} imports {item.name}"


def foreign_imports_of_lower_layers(source: Source) -> Iterator[str]:
    """Third-party imports of attention and graphs beyond what their layer stands on."""
    allowed = LOWER_LAYERS.get(source.folder)
    for item in imports(source):
        known = item.is_relative or item.top in EDGES or item.top in sys.stdlib_module_names
        if allowed is not None and not known and item.top not in allowed:
            yield f"{item.line} {source.folder} imports {item.name}"


def eager_imports(source: Source) -> Iterator[str]:
    """Slow or optional libraries that importing the module would import."""
    for item in imports(source):
        if item.top in LAZY and not item.in_function and not item.for_types:
            yield f"{item.line} {item.name} is imported at module top"


def torch_imports_reached(start: str, sources: Iterable[Source]) -> Iterator[str]:
    """Imports of torch in the module `start` and in all project modules that it imports."""
    by_module = {source.module: source for source in sources}
    waiting, seen = [start], {start}
    while waiting:
        source = by_module[waiting.pop()]
        for item in imports(source):
            if item.for_types:
                continue
            if item.top == "torch":
                yield f"{source.path}:{item.line} imports {item.name}, reached from {start}"
            parts = item.name.split(".")
            prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
            reached = prefixes & by_module.keys() - seen
            waiting += reached
            seen |= reached


# Sizes


def long_files(source: Source) -> Iterator[str]:
    """The file, if it is over the limit."""
    if source.num_lines > MAX_FILE_LINES:
        yield f"1 {source.num_lines} lines, limit {MAX_FILE_LINES}: split it by responsibility"


def long_functions(source: Source) -> Iterator[str]:
    """Functions over the limit; what is nested in one counts."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno} {node.name}: {num_lines} lines, limit {MAX_FUNCTION_LINES}"


def lines_over_budget(sources: Iterable[Source]) -> int:
    """By how many lines the sources together exceed the budget."""
    return max(0, sum(source.num_lines for source in sources) - MAX_TOTAL_LINES)


# Docstrings and statements


def public_definitions(
    body: Iterable[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Public classes, functions and methods; what is local to a function isn't public."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from public_definitions([*node.body, *node.orelse], prefix)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list}


def missing_docstrings(source: Source) -> Iterator[str]:
    """The module and what is public in it, where there is no docstring."""
    if not ast.get_docstring(source.tree):
        yield "1 the module has no docstring"
    for name, node in public_definitions(source.tree.body):
        # Overloads and setters are documented with the implementation and the getter.
        if not _decorators(node) & {"overload", "setter"} and not ast.get_docstring(node):
            yield f"{node.lineno} {name} has no docstring"


def undocumented_fields(source: Source) -> Iterator[str]:
    """Public fields of public dataclasses that no text stands under."""
    for name, node in public_definitions(source.tree.body):
        if not isinstance(node, ast.ClassDef) or "dataclass" not in _decorators(node):
            continue
        for statement, below in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign):
                continue
            target = ast.unparse(statement.target)
            if not target.startswith("_") and not _is_text(below):
                yield f"{statement.lineno} {name}.{target} has no docstring under it"


def _is_text(statement: ast.stmt | None) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return isinstance(text, str) and text.strip() != ""


def global_statements(source: Source) -> Iterator[str]:
    """Uses of the global statement."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno} global {', '.join(node.names)}"


# Folders, requirements, README.md


def shadowing_scripts(paths: Iterable[str]) -> list[str]:
    """Scripts named like a standard module: their folder is first on sys.path and hides it."""
    return [path for path in paths if Path(path).stem in sys.stdlib_module_names]


def folders_with_code(root: Path) -> set[str]:
    """Dotted names of the folders, of top-level packages and below, that hold Python files."""
    tops = [path.parent for path in root.glob("*/__init__.py")]
    files = [file for top in tops for file in top.rglob("*.py")]
    return {".".join(file.parent.relative_to(root).parts) for file in files}


def unpinned(requirements: Iterable[str], constraints: str) -> list[str]:
    """Requirements that constraints.txt doesn't hold to one version."""
    pinned = {line.split("==")[0] for line in constraints.splitlines() if "==" in line}
    return [r for r in requirements if re.split(r"[^\w-]", r)[0].lower() not in pinned]


def declared_variables(environment: Source) -> set[str]:
    """Names in the table of runtime/environment.py."""
    return {
        ast.literal_eval(keyword.value)
        for node in ast.walk(environment.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Variable"
        for keyword in node.keywords
        if keyword.arg == "name"
    }


def used_variables(source: Source) -> set[str]:
    """Environment variables that the code names."""
    values = [node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant)]
    return {v for v in values if isinstance(v, str) and re.fullmatch(r"STEPGRAPH_\w+", v)}


def variables_in_table(readme: str) -> set[str]:
    """Environment variables that rows of a table begin with."""
    return set(re.findall(r"^\|\s*`(STEPGRAPH_\w+)`\s*\|", readme, re.MULTILINE))


def documented_test_command(readme: str) -> str | None:
    """The one line of the bash block under the comment `<!-- test command -->`, if it is there."""
    block = re.compile(r"^<!-- test command -->\s*^```bash\n(.+)\n```$", re.MULTILINE)
    found = block.findall(readme)
    return str(found[0]) if len(found) == 1 else None

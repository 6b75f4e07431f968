"""The repository keeps its rules, and each rule sees what breaks it. Nothing is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests import repo_rules as rules
from tests.repo_rules import Source, parse, read_folder, violations

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
TEST_COMMAND = (
    "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[dev]' && "
    ".venv/bin/pytest -n 2 --dist loadfile"
)


@pytest.fixture(scope="module")
def packages() -> list[Source]:
    sources = [source for folder in rules.PACKAGES for source in read_folder(ROOT, folder)]
    assert {source.folder for source in sources} == set(rules.PACKAGES)
    return sources


@pytest.fixture(scope="module")
def packages_and_scripts(packages: list[Source]) -> list[Source]:
    return packages + read_folder(ROOT, "profiling")


def test_imports_follow_the_layers(packages_and_scripts: list[Source]) -> None:
    assert violations(rules.forbidden_edges, packages_and_scripts) == []


def test_attention_and_graphs_stand_on_torch_and_numpy_alone(packages: list[Source]) -> None:
    assert violations(rules.foreign_imports_of_lower_layers, packages) == []


def test_slow_and_optional_libraries_are_imported_inside_functions(packages: list[Source]) -> None:
    assert violations(rules.eager_imports, packages) == []


def test_scheduler_and_what_it_imports_do_not_import_torch(packages: list[Source]) -> None:
    assert list(rules.torch_imports_reached("runtime.scheduler", packages)) == []


def test_files_are_short(packages_and_scripts: list[Source]) -> None:
    assert violations(rules.long_files, packages_and_scripts) == []


def test_functions_are_short(packages_and_scripts: list[Source]) -> None:
    assert violations(rules.long_functions, packages_and_scripts) == []


def test_packages_together_stay_within_the_line_budget(packages: list[Source]) -> None:
    assert rules.lines_over_budget(packages) == 0


def test_public_modules_classes_and_functions_have_docstrings(packages: list[Source]) -> None:
    assert violations(rules.missing_docstrings, packages) == []


def test_fields_of_options_and_step_values_are_documented(packages: list[Source]) -> None:
    paths = {
        "runtime/config.py",
        "runtime/outputs.py",
        "runtime/resolved_config.py",
        "runtime/step.py",
    }
    sources = [source for source in packages if source.path in paths]
    assert {source.path for source in sources} == paths
    assert violations(rules.undocumented_fields, sources) == []


def test_no_global_statement(packages_and_scripts: list[Source]) -> None:
    assert violations(rules.global_statements, packages_and_scripts) == []


def test_profiling_is_not_a_package() -> None:
    assert not list(ROOT.glob("profiling/**/__init__.py"))


def test_no_profiling_script_hides_a_standard_module() -> None:
    scripts = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("profiling/**/*.py")]
    assert rules.shadowing_scripts(scripts) == []


def test_pyproject_lists_exactly_the_packages_on_disk() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(rules.folders_with_code(ROOT))


def test_requirements_are_pinned_for_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert rules.unpinned(requirements, constraints) == []


def test_environment_variables_are_those_of_the_readme_table(packages: list[Source]) -> None:
    [environment] = [source for source in packages if source.path == "runtime/environment.py"]
    declared = rules.declared_variables(environment)
    assert declared
    assert rules.variables_in_table((ROOT / "README.md").read_text(encoding="utf-8")) == declared


def test_code_names_only_environment_variables_of_the_table(packages: list[Source]) -> None:
    [environment] = [source for source in packages if source.path == "runtime/environment.py"]
    used = set().union(*map(rules.used_variables, packages))
    assert used <= rules.declared_variables(environment)


def test_readme_and_ci_run_the_same_test_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert rules.documented_test_command(readme) == TEST_COMMAND
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert TEST_COMMAND in map(str.strip, script.read_text(encoding="utf-8").splitlines())


# Each rule on examples that break it, and on close ones that don't.

FunctionOfSource = Callable[[Source], Iterable[str]]
LONG_FUNCTION = "def f() -> None:\n" + "    pass\n" * rules.MAX_FUNCTION_LINES
FIELD = "@dataclass(frozen=True)\nclass A:\n    x: int\n"


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (rules.forbidden_edges, "attention/a.py", "import graphs"),
        (rules.forbidden_edges, "attention/a.py", "from runtime.models import Decoder"),
        (rules.forbidden_edges, "graphs/a.py", "def f():\n    from runtime import LLM"),
        (rules.forbidden_edges, "graphs/a.py", "if TYPE_CHECKING:\n    from runtime import LLM"),
        (rules.forbidden_edges, "graphs/a.py", "importlib.import_module('runtime.llm')"),
        (rules.forbidden_edges, "runtime/a.py", "import profiling.report"),
        (rules.forbidden_edges, "runtime/a.py", "from tests import repo_rules"),
        (rules.forbidden_edges, "runtime/a.py", "from runtime.errors import ConfigError"),
        (rules.forbidden_edges, "runtime/examples/a.py", "from runtime.errors import ConfigError"),
        (rules.forbidden_edges, "runtime/examples/a.py", "import profiling"),
        (rules.forbidden_edges, "runtime/a.py", "from ..attention import AttentionSpec"),
        (rules.foreign_imports_of_lower_layers, "attention/a.py", "import transformers"),
        (rules.foreign_imports_of_lower_layers, "graphs/a.py", "def f():\n    import tqdm"),
        (rules.foreign_imports_of_lower_layers, "graphs/a.py", "from flashinfer import page"),
        *(
            (rules.eager_imports, f"{folder}/a.py", f"import {library}")
            for folder in rules.PACKAGES
            for library in rules.LAZY
        ),
        (rules.eager_imports, "runtime/a.py", "try:\n    import triton\nexcept ImportError: ..."),
        (rules.eager_imports, "runtime/a.py", "if not TYPE_CHECKING:\n    import gguf"),
        (rules.eager_imports, "runtime/a.py", "if TYPE_CHECKING: ...\nelse:\n    import gguf"),
        (rules.eager_imports, "runtime/a.py", "class A:\n    from transformers import AutoConfig"),
        (rules.long_files, "runtime/a.py", "\n" * (rules.MAX_FILE_LINES + 1)),
        (rules.long_functions, "runtime/a.py", LONG_FUNCTION),
        (rules.long_functions, "runtime/a.py", "async " + LONG_FUNCTION),
        (rules.missing_docstrings, "runtime/a.py", "x = 1"),
        (rules.missing_docstrings, "runtime/a.py", '"""A."""\nclass A: ...'),
        (rules.missing_docstrings, "runtime/a.py", '"""A."""\nasync def f(): ...'),
        (rules.missing_docstrings, "runtime/a.py", '"""A."""\nif x:\n    def f(): ...'),
        (
            rules.missing_docstrings,
            "runtime/a.py",
            '"""A."""\nclass A:\n    """A."""\n    def f(self): ...',
        ),
        (rules.undocumented_fields, "runtime/a.py", FIELD),
        (rules.undocumented_fields, "runtime/a.py", FIELD + '    ""'),
        (rules.undocumented_fields, "runtime/a.py", FIELD + '    y: int\n    """Only y."""'),
        (rules.global_statements, "runtime/a.py", "def f():\n    global x\n    x = 1"),
    ],
)
def test_rule_reports_what_breaks_it(rule: FunctionOfSource, path: str, text: str) -> None:
    assert len(violations(rule, [parse(path, text)])) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (
            rules.forbidden_edges,
            "graphs/a.py",
            "from attention import LayerAttention\nimport torch",
        ),
        (rules.forbidden_edges, "runtime/examples/a.py", "from runtime import LLM, SamplingParams"),
        (rules.forbidden_edges, "runtime/models/a.py", "from ..errors import ModelLoadError"),
        (rules.forbidden_edges, "runtime/models/__init__.py", "from .config import DecoderConfig"),
        (rules.forbidden_edges, "profiling/a.py", "import runtime, graphs, attention"),
        (rules.foreign_imports_of_lower_layers, "attention/a.py", "import os, torch, numpy.typing"),
        (rules.foreign_imports_of_lower_layers, "attention/a.py", "def f():\n    import triton"),
        (rules.foreign_imports_of_lower_layers, "runtime/a.py", "import tqdm"),
        (rules.eager_imports, "runtime/a.py", "def f():\n    import gguf"),
        (rules.eager_imports, "runtime/a.py", "if TYPE_CHECKING:\n    import transformers"),
        (rules.long_files, "runtime/a.py", "\n" * rules.MAX_FILE_LINES),
        (rules.long_functions, "runtime/a.py", LONG_FUNCTION.replace("    pass\n", "", 1)),
        (rules.missing_docstrings, "runtime/a.py", '"""A."""\ndef _f():\n    def g(): ...'),
        (rules.missing_docstrings, "runtime/a.py", '"""A."""\n@overload\ndef f(): ...'),
        (rules.undocumented_fields, "runtime/a.py", FIELD + '    """A count."""\n    _y: int'),
        (rules.global_statements, "runtime/a.py", "def f():\n    x = 1"),
    ],
)
def test_rule_is_silent_where_it_is_kept(rule: FunctionOfSource, path: str, text: str) -> None:
    assert violations(rule, [parse(path, text)]) == []


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("import torch", "runtime/scheduler.py:1"),
        ("def f():\n    from torch import nn", "runtime/scheduler.py:2"),
        ("from .models.config import A", "runtime/models/config.py:1"),
        ("from .models import config", "runtime/models/config.py:1"),
        ("import attention", "attention/__init__.py:1"),
        ("if TYPE_CHECKING:\n    import torch\nfrom .errors import E", None),
    ],
)
def test_torch_is_found_behind_other_modules(scheduler: str, expected: str | None) -> None:
    sources = [
        parse("runtime/__init__.py", "if TYPE_CHECKING:\n    from .models.config import A"),
        parse("runtime/scheduler.py", scheduler),
        parse("runtime/errors.py", "class E(ValueError): ..."),
        parse("runtime/models/__init__.py", "from ..errors import E"),
        parse("runtime/models/config.py", "import torch"),
        parse("attention/__init__.py", "import torch"),
    ]
    found = list(rules.torch_imports_reached("runtime.scheduler", sources))
    assert [text.split(" ")[0] for text in found] == ([expected] if expected else [])


def test_line_budget_counts_all_files_together() -> None:
    half = parse("runtime/a.py", "\n" * (rules.MAX_TOTAL_LINES // 2))
    assert rules.lines_over_budget([half, half]) == 0
    assert rules.lines_over_budget([half, half, parse("graphs/a.py", "x = 1")]) == 1


def test_script_named_like_a_standard_module_is_found() -> None:
    scripts = ["profiling/profile.py", "profiling/sub/queue.py", "profiling/simulate.py"]
    assert rules.shadowing_scripts(scripts) == scripts[:2]


def test_folder_with_code_counts_without_an_init_file(tmp_path: Path) -> None:
    for file in ("a/__init__.py", "a/b/c.py", "scripts/run.py", ".venv/lib/x/__init__.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert rules.folders_with_code(tmp_path) == {"a", "a.b"}


def test_requirement_without_an_exact_pin_is_found() -> None:
    constraints = "# c\ntorch==2.0.0\nnumpy>=2\n"
    assert rules.unpinned(["torch>=1", "numpy>=1", "tqdm"], constraints) == ["numpy>=1", "tqdm"]


def test_variables_are_read_from_table_code_and_readme() -> None:
    code = parse(
        "runtime/environment.py", "V = (Variable(name='STEPGRAPH_A', help='STEPGRAPH_B'),)"
    )
    assert rules.declared_variables(code) == {"STEPGRAPH_A"}
    assert rules.used_variables(code) == {"STEPGRAPH_A", "STEPGRAPH_B"}
    readme = "Set `STEPGRAPH_C`:\n\n| name | use |\n|---|---|\n| `STEPGRAPH_D` | `STEPGRAPH_E` |\n"
    assert rules.variables_in_table(readme) == {"STEPGRAPH_D"}


@pytest.mark.parametrize(
    ("readme", "command"),
    [
        ("# A\n\n<!-- test command -->\n```bash\nmake test\n```\n", "make test"),
        ("# A\n\n<!-- test command -->\n\n```bash\nmake test\n```\n", "make test"),
        ("# A\n\n```bash\nmake test\n```\n", None),
        ("# A\n\n<!-- test command -->\nText.\n```bash\nmake test\n```\n", None),
        ("# A\n\n<!-- test command -->\n```bash\nmake\nmake test\n```\n", None),
    ],
)
def test_test_command_is_the_one_line_under_its_comment(readme: str, command: str | None) -> None:
    assert rules.documented_test_command(readme) == command

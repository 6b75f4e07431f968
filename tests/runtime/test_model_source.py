"""Whatever a user calls a model becomes a directory, or an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from safetensors.torch import load_file

from runtime import gguf_conversion
from runtime.embedded_model import EMBEDDED_MODEL
from runtime.errors import ModelLoadError
from runtime.model_cache import hash_file
from runtime.model_source import cache_directory, resolve_model
from tests.runtime.tiny_gguf import write_tiny_gguf

ROOT = Path(gguf_conversion.__file__).parents[1]


def names_in(directory: Path) -> set[str]:
    """All but lock files, which may stay or go."""
    return {path.name for path in directory.iterdir() if not path.name.endswith(".lock")}


# The cache directory


def test_cache_directory_follows_the_base_directory_specification(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "stepgraph"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_directory() == tmp_path / ".cache" / "stepgraph"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_directory() == tmp_path / "elsewhere" / "stepgraph"


# Local directories and what is no model at all


def test_a_directory_with_a_config_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(tmp_path) == tmp_path


def test_a_directory_named_like_a_hub_id_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = Path("org") / "name"
    local.mkdir(parents=True)
    (local / "config.json").write_text("{}")
    assert resolve_model("org/name") == local


def test_a_directory_without_a_config_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json$"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(ModelLoadError, match=r"for a GGUF file give its own path: weights\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "reference",
    ["", "gpt2", "/no/such/dir", "./x/y", "a/b/c", "org/name@", "~nobody/x", "\0", "long" * 2000],
)
def test_what_is_no_reference_is_refused_with_what_is_accepted(reference: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(reference)
    for part in (repr(reference), "config.json", ".gguf", "organisation/name", EMBEDDED_MODEL):
        assert part in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelLoadError, match="neither a directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


# GGUF files


def test_a_gguf_file_is_converted_once_per_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write_tiny_gguf(tmp_path / "My model.gguf"), tmp_path / "cache"
    first = resolve_model(str(path), cache_dir=cache)
    assert first.parent == cache
    assert first.name.startswith("My_model-")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names_in(first)

    write_tiny_gguf(path, seed=1)
    second = resolve_model(str(path), cache_dir=cache)
    assert second != first
    assert hash_file(second / "model.safetensors") != hash_file(first / "model.safetensors")

    def refuse(source: Path, target: Path) -> None:
        raise AssertionError(f"{source} was converted again")

    monkeypatch.setattr(gguf_conversion, "convert_gguf", refuse)
    assert resolve_model(str(path), cache_dir=cache) == second
    write_tiny_gguf(path, seed=0)
    assert resolve_model(str(path), cache_dir=cache) == first


def test_an_interrupted_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"

    def interrupt(target: Path, *_: object) -> None:
        target.write_bytes(b"half of the weights")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_conversion, "write_safetensors", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(str(path), cache_dir=cache)
    assert names_in(cache) == set()
    load_file(resolve_model(str(path), cache_dir=cache) / "model.safetensors")


def test_a_refused_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(ModelLoadError, match="truncated or damaged"):
        resolve_model(str(tmp_path / "bad.gguf"), cache_dir=tmp_path / "cache")
    assert names_in(tmp_path / "cache") == set()


def test_processes_that_convert_at_once_get_the_same_whole_directory(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    script = (
        "import sys; from pathlib import Path; from runtime.model_source import resolve_model\n"
        "print(resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2])))\n"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "cache")]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert names_in(tmp_path / "cache") == {Path(outputs[0]).name}
    load_file(Path(outputs[0]) / "model.safetensors")


def test_a_missing_gguf_file_is_an_error_not_a_hub_id() -> None:
    with pytest.raises(ModelLoadError, match=r"org/name\.gguf can't be read: No such file"):
        resolve_model("org/name.gguf")


# The hub


class Hub:
    """Stands for the hub: one repository, as its client would serve it."""

    def __init__(self, root: Path, files: list[str]) -> None:
        self.root, self.files = root, files
        self.asked: dict[str, Any] = {}

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.asked = {"repo_id": repo_id, **options}
        keep = huggingface_hub.utils.filter_repo_objects(
            self.files,
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
        for name in keep:
            (self.root / name).write_text("{}")
        return str(self.root)

    def list_repo_files(self, _: object, repo_id: str, *, revision: str | None) -> list[str]:
        assert repo_id == self.asked["repo_id"]
        assert revision == self.asked["revision"]
        return self.files


def serve(monkeypatch: pytest.MonkeyPatch, root: Path, files: list[str]) -> Hub:
    hub = Hub(root, files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "list_repo_files",
        lambda *args, **options: hub.list_repo_files(*args, **options),
    )
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    return hub


def test_only_what_is_needed_is_fetched_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    }
    unwanted = ["pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "x.gguf"]
    hub = serve(monkeypatch, tmp_path, [*wanted, *unwanted, "original/params.json", "model.h5"])
    assert resolve_model("org/name") == tmp_path
    assert names_in(tmp_path) == wanted
    assert (hub.asked["repo_id"], hub.asked["revision"]) == ("org/name", None)
    resolve_model("org/name.v1-x@refs/pr/3")
    assert (hub.asked["repo_id"], hub.asked["revision"]) == ("org/name.v1-x", "refs/pr/3")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["config.json", "pytorch_model.bin"],
            r"pickle files \(pytorch_model\.bin\), which can run",
        ),
        (["config.json", "weights.pt", "x.txt"], r"pickle files \(weights\.pt\)"),
        (["config.json", "tf_model.h5"], r"the repository has no \.safetensors files"),
        (["model.safetensors"], r"the repository has no config\.json"),
    ],
)
def test_repositories_of_no_use_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], message: str
) -> None:
    serve(monkeypatch, tmp_path, files)
    with pytest.raises(ModelLoadError, match=f"'org/name' can't be loaded: .*{message}"):
        resolve_model("org/name")


def test_errors_of_the_hub_are_model_load_errors_with_their_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    with pytest.raises(ModelLoadError, match=r"'org/name' .* no route to the hub") as caught:
        resolve_model("org/name")
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's own cache with one repository in it, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_text("")
    return snapshot


def test_offline_mode_serves_what_is_in_the_hubs_cache(offline_cache: Path) -> None:
    assert resolve_model("org/name").resolve() == offline_cache.resolve()


def test_offline_mode_names_what_is_not_in_the_hubs_cache(offline_cache: Path) -> None:
    assert offline_cache.is_dir()
    with pytest.raises(ModelLoadError, match=r"'org/other' .* \(HF_HUB_OFFLINE is set\)"):
        resolve_model("org/other")
    (offline_cache / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \.safetensors files"):
        resolve_model("org/name")

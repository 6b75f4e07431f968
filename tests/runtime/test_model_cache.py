"""Nobody may see a half-made directory, and one that is being made is made once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime import model_cache
from runtime.errors import ModelLoadError
from runtime.model_cache import build_directory_once, hash_file

REQUIRED = ("a", "b")
ROOT = Path(model_cache.__file__).parents[1]


def build_both(directory: Path) -> None:
    for name in REQUIRED:
        (directory / name).write_text(name)


def names_in(directory: Path) -> set[str]:
    """All but lock files, which may stay or go."""
    return {path.name for path in directory.iterdir() if not path.name.endswith(".lock")}


def test_a_finished_directory_is_reused(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    calls: list[Path] = []

    def build(directory: Path) -> None:
        calls.append(directory)
        build_both(directory)

    for _ in range(2):
        assert build_directory_once(target, build, required=REQUIRED) == target
    assert len(calls) == 1
    assert names_in(target) == {"a", "b"}
    assert names_in(target.parent) == {"model"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(directory: Path) -> None:
        (directory / "a").write_text("half")
        raise error

    with pytest.raises(error):
        build_directory_once(tmp_path / "model", fail, required=REQUIRED)
    assert names_in(tmp_path) == set()
    build_directory_once(tmp_path / "model", build_both, required=REQUIRED)
    assert names_in(tmp_path / "model") == {"a", "b"}


def test_remains_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; "
        "from runtime.model_cache import build_directory_once\n"
        "def die(directory):\n"
        "    (directory / 'junk').write_text('half')\n"
        "    os._exit(9)\n"
        "build_directory_once(Path(sys.argv[1]), die, required=('a',))\n"
    )
    target = tmp_path / "model"
    died = subprocess.run([sys.executable, "-c", script, str(target)], cwd=ROOT, check=False)
    assert died.returncode == 9
    assert not target.exists()
    assert names_in(tmp_path) == {"model.partial"}

    build_directory_once(target, build_both, required=REQUIRED)
    assert names_in(tmp_path) == {"model"}
    assert names_in(target) == {"a", "b"}


def test_a_directory_that_lost_a_file_is_made_again(tmp_path: Path) -> None:
    target = build_directory_once(tmp_path / "model", build_both, required=REQUIRED)
    (target / "b").unlink()
    (target / "a").write_text("kept from before")
    build_directory_once(target, build_both, required=REQUIRED)
    assert (target / "a").read_text() == "a"


def test_a_second_builder_waits_for_the_first_and_takes_its_result(tmp_path: Path) -> None:
    started, release = threading.Event(), threading.Event()
    calls: list[str] = []

    def build_slowly(directory: Path) -> None:
        calls.append("first")
        started.set()
        assert release.wait(60)
        build_both(directory)

    def build_again(directory: Path) -> None:
        calls.append("second")
        build_both(directory)

    target = tmp_path / "model"
    first = threading.Thread(
        target=build_directory_once, args=(target, build_slowly), kwargs={"required": REQUIRED}
    )
    second = threading.Thread(
        target=build_directory_once, args=(target, build_again), kwargs={"required": REQUIRED}
    )
    first.start()
    assert started.wait(60)
    second.start()
    second.join(0.3)
    assert second.is_alive(), "it must wait while the first one builds"
    release.set()
    first.join(60)
    second.join(60)
    assert calls == ["first"]
    assert names_in(tmp_path) == {"model"}


def test_errors_of_the_file_system_name_the_directory_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"file/model could not be made: .* is writable"):
        build_directory_once(tmp_path / "file" / "model", build_both, required=REQUIRED)


def test_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_file(tmp_path / "file") == expected

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from hatch_epcontext import system
from hatch_epcontext.errors import BuildError, Kind, OutputError
from hatch_epcontext.system import (
    cores,
    free_memory,
    full_disk_problem,
    is_of_system,
    system_problem,
    writing,
)


def test_a_full_disk_is_named_with_what_was_written_and_where_to_go() -> None:
    folder = Path.cwd() / "hatch-epcontext-x"
    with pytest.raises(BuildError) as raised, writing("a model", folder, "a -> npu"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "a.onnx"))
    (problem,) = raised.value.problems
    assert (problem.kind, problem.location) == (Kind.SYSTEM_ERROR, "a -> npu")
    first, second = problem.message.splitlines()
    assert first == (f"{os.strerror(errno.ENOSPC)} while a model was written: {folder / 'a.onnx'}.")
    assert second.startswith("The file system ")
    assert " left." in second
    assert "another file system" in problem.advice()


def test_without_a_file_name_the_folder_is_named() -> None:
    problem = system_problem(OSError(errno.EACCES, "Permission denied"), Path("/a/b"), "x")
    assert problem.message == f"Permission denied while x was written: {Path('/a/b')}."
    assert "choose another folder" in problem.advice()


def test_the_error_can_have_another_type() -> None:
    with pytest.raises(OutputError), writing("a model", Path("x"), error=OutputError):
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (PermissionError(errno.EACCES, "no"), True),
        (OSError(errno.EMFILE, "many"), True),
        (FileNotFoundError(errno.ENOENT, "missing"), False),
        (OSError("libonnx is missing"), False),
    ],
)
def test_what_the_system_refuses_is_no_fault_of_the_program(error: OSError, expected: bool) -> None:
    assert is_of_system(error) == expected


def test_a_disk_is_full_if_somebody_says_so(tmp_path: Path) -> None:
    assert full_disk_problem(tmp_path, "a", "cannot write x") is None
    said = full_disk_problem(tmp_path, "a", "write failed: No space left on device")
    assert said is not None
    assert said.kind is Kind.SYSTEM_ERROR
    assert str(tmp_path) in said.message


def test_this_machine_has_cores() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory is free")
def test_this_machine_has_free_memory() -> None:
    free = free_memory()
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
def test_the_limits_of_a_control_group_and_of_those_around_it_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, own = tmp_path / "groups", tmp_path / "cgroup"
    inside = root / "user" / "build"
    inside.mkdir(parents=True)
    own.write_text("1:cpu:/other\n0::/user/build\n", encoding="utf-8")
    for group, limit, used in ((inside, "max", 10), (root / "user", "1000", 900)):
        (group / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
        (group / "memory.current").write_text(f"{used}\n", encoding="utf-8")
    monkeypatch.setattr(system, "_GROUPS", root)
    monkeypatch.setattr(system, "_OWN_GROUP", own)
    assert free_memory() == 100
    (root / "user" / "memory.current").write_text("2000\n", encoding="utf-8")
    assert free_memory() == 0

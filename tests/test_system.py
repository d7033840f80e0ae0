from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hatch_epcontext.errors import BuildError, Kind, OutputError
from hatch_epcontext.system import full_disk_problem, is_refusal, system_problem, writing


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
    assert is_refusal(error) == expected


def test_a_disk_is_full_if_somebody_says_so(tmp_path: Path) -> None:
    assert full_disk_problem(tmp_path, "a", "cannot write x") is None
    said = full_disk_problem(tmp_path, "a", "write failed: No space left on device")
    assert said is not None
    assert said.kind is Kind.SYSTEM_ERROR
    assert str(tmp_path) in said.message

"""Child processes as users start them, and the example, built in folders with letters of other alphabets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

only_windows = pytest.mark.skipif(sys.platform != "win32", reason="it is about Windows")

EPCONTEXT = ("-c", "from hatch_epcontext.cli import main; main()")


def kernel() -> Any:
    """The functions of the system, which `ctypes` has only on Windows."""
    if sys.platform != "win32":
        raise NotImplementedError
    import ctypes

    return ctypes.WinDLL("kernel32", use_last_error=True)


def variables(temporary: Path, **more: str) -> dict[str, str]:
    """The variables of a child process whose temporary files are in ``temporary``, which is made."""
    temporary.mkdir(parents=True, exist_ok=True)
    own = {name: value for name, value in os.environ.items() if not name.startswith("HATCH_")}
    return {**own, "TEMP": str(temporary), "TMP": str(temporary), **more}


def python(*arguments: str | Path, cwd: Path, env: dict[str, str]) -> bytes:
    """The output of a Python that succeeds, stdout and stderr together."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode("utf-8", "replace")
    return done.stdout


@dataclass(frozen=True)
class Example:
    """The example's project, its wheel, and the variables of its builds."""

    project: Path
    wheel: Path
    env: dict[str, str]

    def build(self, **more: str) -> None:
        """Build the wheel with hatchling."""
        command = ("-m", "hatchling", "build", "-t", "wheel", "-d", self.wheel.parent)
        python(*command, cwd=self.project, env=self.env | more)

    def unpack(self, folder: Path) -> Path:
        """Unpack the wheel into ``folder``, which is returned."""
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(folder)
        return folder


def make_example(folder: Path, temporary: str) -> Example:
    """The example, copied into ``folder`` and built with the folder ``temporary`` for temporary files."""
    project = folder / "ü b"
    ignored = shutil.ignore_patterns("dist", "epcontext", "__pycache__")
    shutil.copytree(REPOSITORY / "example_project", project, ignore=ignored)
    toml = project / "pyproject.toml"
    chip = 'chip = "snapdragon-x-elite"\n'
    text = toml.read_text(encoding="utf-8").replace(chip, f"{chip}recompile = true\n")
    toml.write_text(text, encoding="utf-8")
    wheel = folder / "dist" / "digits_app-1.0.0-py3-none-any.whl"
    env = variables(folder / temporary, HATCH_EPCONTEXT_CACHE_DIR=str(folder / "cache"))
    example = Example(project, wheel, env)
    example.build()
    return example


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """The example, built with temporary files in a folder whose name the code page has."""
    return make_example(tmp_path_factory.mktemp("example"), "Müller")

"""This package itself, built as a release builds it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hatch_epcontext.files import file_sha256
from tests.conftest import REPOSITORY


def run(*command: str | Path, cwd: Path) -> str:
    """What a Python module prints; its exit code must be 0."""
    command = (sys.executable, "-m", *map(str, command))
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project: Path, folder: Path) -> dict[str, str]:
    """Build the sdist and the wheel of ``project`` into ``folder``; returns the sha256 of each."""
    run("hatchling", "build", "-d", folder, cwd=project)
    return {file.name: file_sha256(file) for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build(REPOSITORY, folder)
    return folder


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the sdist, in another folder and with other times."""
    (sdist,) = dist.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        # Python 3.12 and 3.13 warn without it, and Debian 12's 3.11.2 has no argument for it.
        archive.extraction_filter = lambda member, _: member
        for member in archive.getmembers():
            member.mtime += 3600
            archive.extract(member, folder)
    (root,) = folder.iterdir()
    return root


def test_the_sdist_builds_the_same_wheel_and_sdist(
    dist: Path, unpacked: Path, tmp_path: Path
) -> None:
    built = {file.name: file_sha256(file) for file in sorted(dist.iterdir())}
    assert len(built) == 2
    assert build(unpacked, tmp_path) == built


def test_the_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = REPOSITORY / "hatch_epcontext"
    files = (file.relative_to(REPOSITORY) for file in package.rglob("*") if file.is_file())
    assert names == {file.as_posix() for file in files if "__pycache__" not in file.parts}


def test_indexes_accept_both(dist: Path) -> None:
    printed = run("twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)
    assert printed.count("PASSED") == 2


def test_the_wheel_installs_nothing_by_accident(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert run("check_wheel_contents", wheel, cwd=dist).rstrip().endswith("OK")

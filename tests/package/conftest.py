from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext.package.bundle import bundle
from hatch_epcontext.package.folder import read
from hatch_epcontext.package.manifest import FILE, ModelPackage
from tests.results import MODULES, TOML, Artifact, configured, resulting

OUTPUT = PurePosixPath("my_app/epcontext")
"""The package's folder in the wheels of these tests."""


@pytest.fixture
def finished(project: Path, artifact: Artifact, tmp_path: Path) -> dict[str, bytes]:
    """The contents of a wheel's files, by name."""
    config = configured(project, TOML + 'fallback = "source"')
    bundled = bundle(resulting(config, artifact), tmp_path, MODULES)
    entries = bundled.entries(OUTPUT)
    files = {name: file.read_bytes() for name, file in entries.items()}
    return {**files, "my_app/__init__.py": b""}


def opened(folder: Path) -> ModelPackage:
    """The package in ``folder``, which this package wrote."""
    package = read((folder / FILE).read_bytes(), "package")
    assert package is not None
    return package

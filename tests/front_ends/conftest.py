from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from tests.integration.conftest import build_wheel, environment_without, make_environment

NEEDED = (
    "hatchling", "hatch-vcs", "hatch-fancy-pypi-readme", "editables",
    "setuptools", "scikit-build-core", "cmake", "ninja", "maturin",
)  # fmt: skip
"""What the projects of these tests are built with, beside this package."""


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of this checkout, and of all that the projects are built with."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    build_wheel(folder)
    (ours,) = folder.glob("*.whl")
    pip = make_environment(tmp_path_factory.mktemp("download") / "venv", os.environ)
    pip.install("pip")
    needed = [f"{ours}[cpu]", *NEEDED]
    pip.python("-m", "pip", "download", "-q", "--only-binary=:all:", "-d", folder, *needed)
    return folder


@pytest.fixture(scope="session")
def env(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of front ends: they find everything in the wheelhouse, and nothing elsewhere."""
    hidden = ("HATCH_", "PYTHON", "VIRTUAL_ENV", "PIP_", "UV_", "PDM_", "POETRY_")
    return environment_without(*hidden) | {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheelhouse.as_uri(),
        # Most of the time that it takes to install ONNX Runtime.
        "PIP_NO_COMPILE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(wheelhouse),
        "UV_CACHE_DIR": str(tmp_path_factory.mktemp("uv")),
        "HATCH_DATA_DIR": str(tmp_path_factory.mktemp("hatch")),
        "PDM_CACHE_DIR": str(tmp_path_factory.mktemp("pdm")),
        "PDM_LOG_DIR": str(tmp_path_factory.mktemp("pdm-log")),
        "PDM_CHECK_UPDATE": "0",
        "POETRY_CACHE_DIR": str(tmp_path_factory.mktemp("poetry")),
        "POETRY_VIRTUALENVS_IN_PROJECT": "true",
    }


@pytest.fixture(scope="session")
def index(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index with the wheelhouse's wheels, for front ends that take no folder."""
    root = tmp_path_factory.mktemp("index")
    for wheel in wheelhouse.glob("*.whl"):
        name, *_ = parse_wheel_filename(wheel.name)
        (root / name).mkdir(exist_ok=True)
        shutil.copy(wheel, root / name / wheel.name)
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass

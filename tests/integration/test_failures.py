"""What a user sees when a build fails: one clear message, and no half-written file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.altered_workers import write_broken_qnn
from tests.conftest import needs_qnn
from tests.integration.conftest import Environment, run
from tests.projects import PROJECT, make_project

CHIP = """
targets.qnn.provider = "qnn"
targets.qnn.allow-unknown-options = true
targets.qnn.provider-options = { soc_model = 9999 }
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
"""

CPU = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


class Project:
    """A project that is built without isolation, and the files that its builds leave."""

    def __init__(self, root: Path, env: dict[str, str]) -> None:
        self.root = root
        self.cache = root.parent / "cache"
        self.temporary = root.parent / "temporary"
        self.temporary.mkdir()
        self.env = env | {
            "HATCH_EPCONTEXT_CACHE_DIR": str(self.cache),
            "TMPDIR": str(self.temporary),
            "TEMP": str(self.temporary),
            "TMP": str(self.temporary),
        }

    def configure(self, toml: str) -> None:
        (self.root / "pyproject.toml").write_text(PROJECT + toml, encoding="utf-8")

    def files(self) -> set[str]:
        return {p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file()}

    def failure(self, python: Path = Path(sys.executable)) -> str:
        """The output of a build that must fail and leave nothing."""
        before = self.files()
        command = (python, "-m", "hatchling", "build", "-t", "wheel")
        text = run(*command, cwd=self.root, env=self.env, fails=True)
        assert "Traceback (most recent call last)" not in text.split("the worker's log:")[0]
        assert self.files() == before
        # The report, what was read of the models and what was refused stay in the cache, and no artifact.
        kept = {
            path.relative_to(self.cache).parts for path in self.cache.rglob("*") if path.is_file()
        }
        kinds = {parts[1] for parts in kept}
        assert kinds <= {"facts", "searches", "index", "locks", "reports"}
        assert not list(self.temporary.glob("hatch-epcontext-*"))
        return text


@pytest.fixture
def project(tmp_path: Path, env: dict[str, str]) -> Project:
    return Project(make_project(tmp_path / "project", ""), env)


@needs_qnn
def test_a_chip_that_the_ep_does_not_know_is_named(project: Project) -> None:
    project.configure(CHIP)
    text = project.failure()
    assert "a -> qnn: EPC301\n    QNNExecutionProvider compiled no node of the model." in text
    assert "QNN_DEVICE_ERROR_INVALID_CONFIG" in text


@needs_qnn
@pytest.mark.skipif(sys.platform != "linux", reason="a library of Linux is altered")
def test_an_ep_whose_own_libraries_do_not_load(project: Project) -> None:
    name = write_broken_qnn(project.root.parent / "broken")
    project.env["PYTHONPATH"] = str(project.root.parent / "broken")
    project.configure(CHIP.replace("9999", "60"))
    text = project.failure()
    assert (
        f"a -> qnn: EPC105\n    the EP cannot load its own libraries, because {name} is missing."
        in text
    )
    assert f"apt-file search {name}" in text


@pytest.mark.network
def test_a_provider_that_is_not_installed(
    project: Project, fresh: Environment, wheelhouse: Path
) -> None:
    fresh.install(next(wheelhouse.glob("*.whl")))
    project.configure(CPU)
    python = fresh.executable("python")
    text = project.failure(python)
    assert "4 build requirements are missing: onnxruntime>=1.23 (not installed)" in text
    assert '-m pip install "onnxruntime>=1.23" "onnx>=1.19" "onnxslim>=0.1.80" "numpy>=2.0"' in text
    assert "Or build with isolation: then the front end installs them." in text

"""What a user sees when something is wrong: one clear message, and nothing half done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import needs_qnn
from tests.integration.conftest import Environment, run, tool
from tests.models import network, save
from tests.projects import PROJECT

QNN = """
provider = "qnn"
provider-options = { soc_model = 60, htp_arch = 73 }
models = ["models/a.onnx"]
"""

CPU = 'provider = "cpu"\nmodels = ["models/a.onnx"]\n'

DYING = "import os, signal\nprint('compiling', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n"


class Workshop:
    """A project to be built without isolation, and what its builds leave behind."""

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
        """What is printed by a build that has to fail and to leave nothing."""
        before = self.files()
        command = ("-m", "hatchling", "build", "-t", "wheel")
        told = run(python, *command, cwd=self.root, env=self.env, fails=True)
        assert "Traceback (most recent call last)" not in told.split("the worker's log:")[0]
        assert self.files() == before
        # What became of the jobs is kept, and nothing that they made.
        kept = [path for path in self.cache.rglob("*") if path.is_file()]
        assert not [path for path in kept if path.parent != self.cache / "reports"]
        assert not list(self.temporary.glob("hatch-epcontext-*"))
        return told


@pytest.fixture
def workshop(tmp_path: Path, env: dict[str, str]) -> Workshop:
    root = tmp_path / "project"
    (root / "my_app").mkdir(parents=True)
    (root / "my_app" / "__init__.py").touch()
    save(network(), root / "models" / "a.onnx")
    return Workshop(root, env)


def test_a_broken_configuration(workshop: Workshop) -> None:
    workshop.configure(CPU + 'jbs = 2\nfallback = "yes"\n')
    told = workshop.failure()
    assert told.startswith("epcontext: the configuration is not right (2 problems):\n")
    assert 'tool.epcontext.fallback\n    must be "source" or "none", and is "yes".' in told
    assert 'tool.epcontext.jbs\n    is not a known key.\n    Did you mean "jobs"?' in told


def test_a_missing_model(workshop: Workshop) -> None:
    workshop.configure('provider = "cpu"\nmodels = ["models/b.onnx"]\n')
    assert 'there is no model at "models/b.onnx"' in workshop.failure()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"hello, I am text\n", "a.onnx is not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
        (network().SerializeToString()[:3000], "a.onnx is not an ONNX model"),
    ],
    ids=["text", "lfs", "cut"],
)  # fmt: skip
def test_a_corrupt_model(workshop: Workshop, content: bytes, what: str) -> None:
    workshop.configure(CPU)
    (workshop.root / "models" / "a.onnx").write_bytes(content)
    assert what in workshop.failure()


@needs_qnn
def test_an_open_dimension(workshop: Workshop) -> None:
    workshop.configure(QNN)
    told = workshop.failure()
    assert "the input 'x' has an open dimension (batch x 1 x 8 x 8)" in told
    assert "dims = { batch = 1 }" in told


@needs_qnn
def test_an_impossible_chip(workshop: Workshop) -> None:
    workshop.configure(QNN.replace("htp_arch = 73", "htp_arch = 999"))
    assert (
        "tool.epcontext.provider-options.htp_arch\n    must be one of 0, 68" in workshop.failure()
    )


@needs_qnn
def test_a_chip_that_the_ep_does_not_know(workshop: Workshop) -> None:
    workshop.configure(
        'provider = "qnn"\nprovider-options = { soc_model = 9999 }\n'
        'models = [{ path = "models/a.onnx", dims = { batch = 1 } }]\n'
    )
    told = workshop.failure()
    assert "a -> qnn\n    QNNExecutionProvider compiled no node of the model." in told
    assert "QNN_DEVICE_ERROR_INVALID_CONFIG" in told


def test_a_provider_that_is_not_installed(
    workshop: Workshop, fresh: Environment, wheelhouse: Path
) -> None:
    fresh.install(next(wheelhouse.glob("*.whl")))
    workshop.configure(CPU)
    python = fresh.executable("python")
    told = workshop.failure(python)
    assert "lacks what this takes: onnxruntime>=1.23 (is not installed)" in told
    assert '-m pip install "onnxruntime>=1.23" "onnx>=1.19" "onnxslim>=0.1.80" "numpy>=2.0"' in told
    assert "Or build with isolation, which installs it by itself." in told


def test_a_worker_that_dies(workshop: Workshop) -> None:
    instead = workshop.root.parent / "instead"
    instead.mkdir()
    (instead / "onnx.py").write_text(DYING, encoding="utf-8")
    workshop.env["PYTHONPATH"] = str(instead)
    workshop.configure(CPU)
    told = workshop.failure()
    assert "reading the models\n    the worker crashed with SIGSEGV." in told
    assert "    | compiling" in told


def test_a_worker_that_takes_too_long(workshop: Workshop) -> None:
    instead = workshop.root.parent / "instead"
    instead.mkdir()
    (instead / "onnx.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    workshop.env["PYTHONPATH"] = str(instead)
    workshop.configure(CPU + "timeout = 2\n")
    assert "it took longer than 2 seconds" in workshop.failure()


def test_a_folder_that_is_taken(workshop: Workshop) -> None:
    workshop.configure(CPU + 'output = "my_app"\n')
    assert 'the wheel has files of the project\'s own in "my_app"' in workshop.failure()


def test_front_ends_show_the_message_without_a_traceback(
    workshop: Workshop, env: dict[str, str]
) -> None:
    workshop.configure(CPU + "jbs = 2\n")
    for command in (
        (sys.executable, "-m", "build", "-w", "."),
        (sys.executable, "-m", "pip", "wheel", "--no-deps", "."),
        (tool("uv"), "build", "--wheel"),
        (tool("hatch"), "build", "-t", "wheel"),
    ):
        told = run(*command, cwd=workshop.root, env=workshop.env, fails=True)
        assert "tool.epcontext.jbs" in told
        assert "Traceback" not in told


def test_a_cache_folder_that_cannot_be_written_is_no_failure(workshop: Workshop) -> None:
    workshop.cache.write_text("in the way", encoding="utf-8")
    workshop.configure(CPU)
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel")
    told = run(*command, cwd=workshop.root, env=workshop.env)
    assert told.count("cannot be written") == 1
    assert "my_app-1.0-py3-none-any.whl" in told

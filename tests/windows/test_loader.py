"""The loader, where the code page does not have the letters of the app's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.windows.conftest import Example, only_windows, python, variables

pytestmark = only_windows

OPEN = """
from digits_app.epcontext import load, target_of
session = load("digits", device="any"{})
# The EP's log may end with half a character of UTF-16.
print()
print(target_of(session), session.get_providers()[0])
"""

NO_SHORT_PATHS = """
import ctypes
class Kernel:
    def GetShortPathNameW(self, *_):
        return 0
ctypes.windll.kernel32 = Kernel()
"""


@pytest.fixture(scope="module")
def app(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app, unpacked where QNN cannot read its path."""
    return example.unpack(tmp_path_factory.mktemp("app") / "日本")


def opened(app: Path, code: str, tmp_path: Path) -> list[str]:
    """The target and the EP that ``code`` prints last."""
    printed = python("-c", code, cwd=app, env=variables(tmp_path / "temporary"))
    return printed.decode().split()[-2:]


def test_qnn_gets_the_short_path(app: Path, tmp_path: Path) -> None:
    code = OPEN.format(', target="x-elite"')
    assert opened(app, code, tmp_path) == ["x-elite", "QNNExecutionProvider"]


def test_without_a_short_path_the_next_target_is_opened(app: Path, tmp_path: Path) -> None:
    code = NO_SHORT_PATHS + OPEN.format("")
    assert opened(app, code, tmp_path) == ["cpu", "CPUExecutionProvider"]


EXPLAIN = """
import digits_app.epcontext._recompile as compiling
compiling._SECONDS = {}
from digits_app.epcontext import explain
attempts = explain("digits", device="any", recompile={})
print()
for attempt in attempts:
    print(attempt)
"""


def test_a_context_that_is_refused_is_compiled_in_a_process(app: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(app, tmp_path / "日本")
    blob = broken / "digits_app/epcontext/digits/x-elite/digits_ctx_qnn.bin"
    blob.write_bytes(bytes(blob.stat().st_size))
    (tmp_path / "cache").mkdir()
    kept = tmp_path / "cache" / "digits_app" / "compiled"

    def explained(seconds: float, recompile: object) -> str:
        env = variables(tmp_path / "temporary", LOCALAPPDATA=str(tmp_path / "cache"))
        printed = python("-c", EXPLAIN.format(seconds, repr(recompile)), cwd=broken, env=env)
        return printed.decode("utf-8", "replace")

    # Starting onnxruntime takes longer.
    assert "x-elite: failed, compiling it on this machine: the compiler" in explained(0.1, True)
    assert sorted(path.suffix for path in kept.iterdir()) == [".json", ".lock"]
    next(kept.glob("*.json")).unlink()
    assert "x-elite: skipped, it is compiled in the background" in explained(600, "background")
    wait_for(lambda: any(kept.glob("*/files.json")))
    opened = "x-elite: opened, QNNExecutionProvider on cpu, compiled on this machine"
    assert opened in explained(600, True)
    assert sorted(path.suffix for path in kept.iterdir()) == ["", ".lock"]

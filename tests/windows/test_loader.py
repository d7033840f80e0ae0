"""The loader, where the code page does not have the letters of the app's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

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

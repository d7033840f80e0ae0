"""The libraries of EPs."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest

from tests.conftest import needs_qnn
from tests.loader.shipped import (
    CPU,
    CPU_EP,
    NPU,
    QNN,
    QNN_EP,
    Shipper,
    Table,
    changed,
    opener,
    plugin_of,
)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Table]]:
    """Creates the package of an EP's library, with the given code; returns its entry in a manifest."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "site").mkdir()

    def create(code: str) -> Table:
        (tmp_path / "site" / "some_ep.py").write_text(code, encoding="utf-8")
        importlib.invalidate_caches()
        return {"module": "some_ep", "package": "some-ep", "registration_name": "Some"}

    yield create
    sys.modules.pop("some_ep", None)


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "folder", "wrong"])
def test_a_target_whose_library_cannot_be_loaded_is_skipped(
    ship: Shipper, plugin: Callable[[str], Table], tmp_path: Path, kind: str
) -> None:
    library = tmp_path / "libnothing.so"
    if kind == "empty":
        library.touch()
    elif kind == "text":
        library.write_text("not a library" * 100, encoding="utf-8")
    elif kind == "folder":
        library.mkdir()
    elif kind == "wrong":
        # A library, but not of an EP.
        library = next(Path(onnxruntime.__file__).parent.rglob("onnxruntime_pybind11_state*"))
    app = ship(npu=changed(NPU, plugin=plugin(f"def get_library_path(): return {str(library)!r}")))
    npu, source = app.explain("a")
    assert npu.outcome == "skipped"
    assert "the library of some-ep cannot be loaded" in npu.reason
    assert source.outcome == "opened"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "AttributeError: module 'some_ep'"),
        ("get_library_path = 5", "(TypeError: 'int' object"),
        ("def get_library_path(): raise OSError('no driver')", "(OSError: no dr"),
        ("raise OSError('no DLL')", "(OSError: no DLL)"),
        ("import no_such_module", "some-ep is not installed (No module named 'no_such_module')"),
        ("raise ImportError('DLL load failed')", "some-ep is not installed (DLL load failed)"),
        ("1 +", "(SyntaxError"),
    ],
)
def test_a_package_of_an_ep_that_names_no_library_is_skipped(
    ship: Shipper, plugin: Callable[[str], Table], code: str, reason: str
) -> None:
    app = ship(npu=changed(NPU, plugin=plugin(code)))
    npu, source = app.explain("a")
    assert npu.outcome == "skipped"
    assert reason in npu.reason
    assert source.outcome == "opened"


def test_the_app_has_to_register_a_library_without_a_package(ship: Shipper) -> None:
    without = {"module": "", "package": "its library", "registration_name": "Some", "path": ""}
    app = ship(npu=changed(NPU, plugin=without))
    npu, _ = app.explain("a")
    assert npu.outcome == "skipped"
    assert "the app has registered no library" in npu.reason


@needs_qnn
def test_a_name_that_is_registered_already_is_no_error(
    ship: Shipper, plugin: Callable[[str], Table], tmp_path: Path
) -> None:
    """Another loader was faster, and the library offers no device."""
    import onnxruntime_qnn

    # In another folder, so that the devices of the library itself do not count.
    library = shutil.copy(onnxruntime_qnn.get_library_path(), tmp_path)
    entry = plugin(f"def get_library_path(): return {str(library)!r}")
    app = ship(npu=changed(NPU, plugin={**entry, "registration_name": CPU_EP}))
    npu, _ = app.explain("a")
    assert str(npu) == "npu: skipped, SomeExecutionProvider finds no npu on this machine"


@needs_qnn
def test_a_library_that_is_registered_under_another_name_is_used(qnn: Shipper) -> None:
    """As Windows ML or the app may have registered it."""
    import onnxruntime_qnn

    app = qnn(npu=QNN)
    assert app.target_of(app.load("a", device="any")) == "npu"
    library = os.path.relpath(onnxruntime_qnn.get_library_path())
    renamed = copy.deepcopy(QNN)
    renamed["ep"] = "NoSuchExecutionProvider"
    renamed["executor_info"]["ort"]["session_options"] = {}
    app = qnn(npu=renamed)
    devices = opener(app)._devices(library)
    assert QNN_EP in {each.ep_name for each in devices}
    assert opener(app)._devices() == []
    assert opener(app)._devices(str(qnn.folder)) == []
    (npu, _) = app.explain("a", device="any")
    assert str(npu) == "npu: opened, NoSuchExecutionProvider on cpu"


COUNT = """
import json, sys, threading
import onnxruntime
register, calls = onnxruntime.register_execution_provider_library, []
def counted(name, library):
    calls.append(name)
    return register(name, library)
onnxruntime.register_execution_provider_library = counted
from shipped import load, target_of
"""

FORTY = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    sessions = list(pool.map(lambda _: load("a", device="any"), range(8)))
more = [load("a", device="any") for _ in range(8)]
print(json.dumps([calls, sorted({target_of(each) for each in (*sessions, *more)})]))
"""

APP_FIRST = """
import onnxruntime_qnn
register(sys.argv[1], onnxruntime_qnn.get_library_path())
session = load("a", device="any")
print(json.dumps([calls, target_of(session), session.get_providers()]))
"""

APP_AT_THE_SAME_MOMENT = """
import onnxruntime_qnn
library = onnxruntime_qnn.get_library_path()
barrier = threading.Barrier(4)
results = []
def from_app():
    barrier.wait()
    try:
        register("QNNExecutionProvider", library)
    except Exception as error:
        assert "already registered" in str(error), error
def from_loader():
    barrier.wait()
    results.append(target_of(load("a", device="any")))
threads = [threading.Thread(target=each) for each in (from_app, from_loader) * 2]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(json.dumps(results))
"""

APP_BETWEEN = """
import onnxruntime_qnn
library = onnxruntime_qnn.get_library_path()
def late(name, library):
    # The app registers it after the loader has looked for it.
    register(name, library)
    return counted(name, library)
onnxruntime.register_execution_provider_library = late
print(json.dumps([target_of(load("a", device="any")), calls]))
"""


@needs_qnn
def test_a_library_is_registered_once_in_a_process(qnn: Shipper) -> None:
    qnn(npu=QNN)
    assert qnn.script(COUNT + FORTY) == [[QNN_EP], ["npu"]]


@needs_qnn
@pytest.mark.parametrize("name", [QNN_EP, "com.my.app.qnn"])
def test_a_library_that_the_app_has_registered_is_not_registered_again(
    qnn: Shipper, name: str
) -> None:
    qnn(npu=QNN)
    assert qnn.script(COUNT + APP_FIRST, name) == [[], "npu", [name, CPU_EP]]


@needs_qnn
def test_the_app_may_register_the_library_at_the_same_moment(qnn: Shipper) -> None:
    qnn(npu=QNN)
    assert qnn.script(COUNT + APP_AT_THE_SAME_MOMENT) == ["npu", "npu"]
    assert qnn.script(COUNT + APP_BETWEEN) == ["npu", [QNN_EP]]


WINDOWS_ML = """
import types
from collections import namedtuple
import onnxruntime_qnn
Provider = namedtuple("Provider", "name ready_state library_path")
ready, absent = types.SimpleNamespace(name="Ready"), types.SimpleNamespace(name="NotPresent")
class EpCatalog:
    made = 0
    def __init__(self):
        EpCatalog.made += 1
    def find_all_providers(self):
        yield Provider("DamagedExecutionProvider", ready, "damaged.dll")
        yield Provider("QNNExecutionProvider", ready, onnxruntime_qnn.get_library_path())
        yield Provider("OtherExecutionProvider", absent, "nothing.dll")
sys.modules["windowsml"] = types.SimpleNamespace(EpCatalog=EpCatalog)
sessions = [load("a", device="any", windows_ml=True) for _ in range(2)]
print(json.dumps([calls, [target_of(each) for each in sessions], EpCatalog.made]))
"""


@needs_qnn
def test_what_windows_ml_has_ready_is_registered_once(qnn: Shipper) -> None:
    """With a stand-in for the package windowsml, as its documentation describes it: not run on Windows."""
    qnn(npu=QNN)
    registered = ["DamagedExecutionProvider", QNN_EP]
    assert qnn.script(COUNT + WINDOWS_ML) == [registered, ["npu", "npu"], 1]


def test_without_a_catalogue_windows_ml_changes_nothing(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError

    app = ship(cpu=CPU)
    for module in (None, SimpleNamespace(EpCatalog=broken)):
        monkeypatch.setitem(sys.modules, "windowsml", module)
        assert app.target_of(app.load("a", windows_ml=True)) == "cpu"


def test_a_module_is_not_imported_for_an_ep_that_is_registered(
    ship: Shipper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spy_ep.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    app = ship(cpu=changed(CPU, plugin=plugin_of("spy_ep")))
    assert app.target_of(app.load("a")) == "cpu"
    assert "spy_ep" not in sys.modules

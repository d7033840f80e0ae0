"""Fixtures for the shipped module, which runs with the real onnxruntime."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from tests.loader.shipped import OPENVINO_EP, Shipper, Table, run_as, variant
from tests.models import network, save


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipper:
    """Creates shipped packages; what is compiled on the user's machine goes into ``tmp_path/home``."""
    # Restored at the end, and until then replaced by each package that is shipped.
    monkeypatch.setitem(sys.modules, "shipped", ModuleType("shipped"))
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("LOCALAPPDATA", str(home))
    monkeypatch.setenv("HOME", str(home))
    return Shipper(tmp_path)


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a context that QNN compiled, with the prepared model."""
    from tests.worker.actions.test_compile import X_ELITE, compile_request, run_compile, target

    folder = tmp_path_factory.mktemp("context")
    source = save(network(1), folder / "models" / "a.onnx")
    to = target("qnn", X_ELITE, recompile=True)
    request = compile_request(Model("a", source, Key()), to, folder)
    run_compile(request)
    return Path(request.folder)


@pytest.fixture(scope="session")
def openvino_context(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Table]:
    """The folder of a context that OpenVINO compiled for its CPU device, and its variant."""
    if importlib.util.find_spec("onnxruntime_ep_openvino") is None:
        pytest.skip("onnxruntime-ep-openvino has no wheels for this Python or platform")
    from hatch_epcontext.errors import UnavailableError
    from tests.worker.actions.test_compile import compile_request, run_compile, target

    folder = tmp_path_factory.mktemp("openvino")
    source = save(network(1), folder / "models" / "a.onnx")
    to = target("openvino", device="cpu", recompile=True)
    request = compile_request(Model("a", source, Key()), to, folder)
    try:
        reply = run_compile(request)
    except UnavailableError as error:
        pytest.skip(f"OpenVINO offers no CPU device on this processor ({error})")
    entry = variant(
        "a/openvino",
        "a_ctx.onnx",
        session_options={"session.disable_model_compile": "1"},
        product="context",
        plugin={
            "module": "onnxruntime_ep_openvino",
            "package": "onnxruntime-ep-openvino",
            "registration_name": OPENVINO_EP,
        },
        prepared="prepared/a.onnx",
        settings={"ep": OPENVINO_EP, "device": "cpu"},
        compares=True,
    )
    entry["compatibility_string"] = reply.contexts[0].compatibility
    return Path(request.folder), entry


@pytest.fixture
def openvino(ship: Shipper, openvino_context: tuple[Path, Table]) -> tuple[Shipper, Table]:
    """Creates packages in which ``a/openvino`` is the folder of the returned variant."""
    folder, entry = openvino_context
    shutil.copytree(folder, ship.folder / "a" / "openvino")
    return ship, copy.deepcopy(entry)


@pytest.fixture
def qnn(ship: Shipper, context: Path) -> Shipper:
    """Creates packages in which ``a/npu`` is the folder of `QNN`."""
    shutil.copytree(context, ship.folder / "a" / "npu")
    return ship


@pytest.fixture
def from_zip(ship: Shipper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Puts the package into a zip archive as ``zipped.epcontext``, and imports it from there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()

    def create() -> Any:
        archive = tmp_path / f"{len(list(tmp_path.glob('*.zip')))}.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
            opened.writestr("zipped/__init__.py", "")
            for path in sorted(ship.folder.rglob("*")):
                name = path.relative_to(ship.folder).as_posix()
                opened.write(path, f"zipped/epcontext/{name}")
        shutil.rmtree(ship.folder)
        monkeypatch.syspath_prepend(archive)
        for name in ("zipped", "zipped.epcontext"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.find_spec("zipped.epcontext")
        assert spec is not None
        assert type(spec.loader).__name__ == "zipimporter"
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "zipped.epcontext", module)
        run_as(module)
        return module

    return create

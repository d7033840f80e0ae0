"""Models in companion wheels: import packages of their own, which the app's package names."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.loader.shipped import (
    CPU,
    CPU_EP,
    NPU,
    SOURCE,
    Shipper,
    Table,
    X,
    component,
    damage,
    outcomes,
)
from tests.loader.test_runner import BATCH
from tests.models import network, save

MODULES = {"npu": "my_npu", "cpu": "my_cpu", "source": "my_source"}

COMPANIONS = {"my_npu": "my-app[npu]", "my_cpu": "my-app[cpu]", "my_source": "my-app[source]"}

NPU_MISSING = ("npu", "skipped")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Installs the companion ``module`` with these variants; returns its folder."""
    monkeypatch.syspath_prepend(tmp_path)

    def create(module: str, identity: str = "1", **variants: Table) -> Path:
        companion = Shipper(tmp_path)
        companion.folder = tmp_path / module
        companion.write({"a": component(variants, identity=identity, batch=BATCH)})
        importlib.invalidate_caches()
        return companion.folder

    yield create
    # From a zip archive it is imported.
    sys.modules.pop("my_cpu", None)


def ship_app(ship: Shipper, modules: Mapping[str, str] = MODULES, **variants: Table) -> Any:
    return ship.write({"a": component(variants, identity="1", modules=modules)}, COMPANIONS)


def test_what_is_not_installed_is_skipped_with_the_command(ship: Shipper) -> None:
    app = ship_app(ship)
    assert app.models() == ["a"]
    attempts = app.explain("a", recompile=True)
    assert outcomes(attempts) == [(name, "skipped") for name in MODULES]
    assert attempts[0].reason == "its models are not installed: pip install 'my-app[npu]'"
    with pytest.raises(app.LoadError, match=r"'a' on npu: .*pip install 'my-app\[npu\]'"):
        app.path("a").__enter__()
    options = onnxruntime.SessionOptions()
    assert outcomes(app.explain("a", target="npu", session_options=options)) == [NPU_MISSING]
    reference = weakref.ref(options)
    del options
    gc.collect()
    assert reference() is None


def test_targets_of_the_app_and_of_companions_are_tried_in_the_configured_order(
    ship: Shipper, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("my_cpu", cpu=CPU)
    app = ship_app(ship, {**MODULES, "source": ""}, source=SOURCE)
    attempts = app.explain("a", recompile=True)
    assert outcomes(attempts) == [NPU_MISSING, ("cpu", "opened"), ("source", "not needed")]
    for verify in (False, True):
        session = app.load("a", target="cpu", verify=verify)
        assert session.run(None, X)[0].shape == (1, 10)
    assert app.shapes_of(session) == {"x": ("batch", 1, 8, 8)}
    assert "my_cpu" not in sys.modules
    with app.path("a") as file:
        assert file == folder / "a/cpu/a_optimized.onnx"
    for wrong in ({"X": (1, 1, 8, 8)}, {"x": (1, 8, 8)}):
        # Of the first target, which is not installed, no input is known.
        with pytest.raises(app.LoadError, match=r"has the inputs \{'x': "):
            app.load("a", shapes=wrong)
    monkeypatch.setenv("EPCONTEXT_TARGET", "cpu")
    assert outcomes(app.explain("a")) == [("cpu", "opened")]
    monkeypatch.setenv("EPCONTEXT_TARGET", "npu")
    assert outcomes(app.explain("a")) == [NPU_MISSING]


def test_models_of_another_version_are_refused(
    ship: Shipper, install: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    install("my_cpu", "2", cpu=CPU)
    # One that lacks the target.
    install("my_npu", cpu=CPU)
    attempts = ship_app(ship, {**MODULES, "source": ""}, source=SOURCE).explain("a")
    assert outcomes(attempts) == [("npu", "failed"), ("cpu", "failed"), ("source", "opened")]
    reason = "my_cpu is for another version of this model: pip install 'my-app[cpu]'"
    assert attempts[1].reason == reason
    assert reason in caplog.text


@pytest.mark.parametrize("file", ["a/cpu/a_optimized.onnx", "manifest.json", "__init__.py"])
def test_a_damaged_companion_is_not_opened(
    ship: Shipper, install: Callable[..., Path], file: str
) -> None:
    folder = install("my_cpu", cpu=CPU)
    app = ship_app(ship)
    damage(folder / file)
    assert outcomes(app.explain("a", verify=True))[1] == ("cpu", "failed")


def test_an_altered_app_does_not_say_what_a_companion_must_be(
    ship: Shipper, install: Callable[..., Path]
) -> None:
    install("my_cpu", cpu=CPU)
    app = ship_app(ship)
    manifest = ship.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("my-app[npu]", "my_app[npu]"))
    assert outcomes(app.explain("a", target="cpu")) == [("cpu", "opened")]
    assert outcomes(app.explain("a", target="cpu", verify=True)) == [("cpu", "failed")]


def test_only_a_package_is_opened_and_nothing_is_imported(ship: Shipper) -> None:
    (ship.root / "evil.py").write_text("raise SystemExit", encoding="utf-8")
    (ship.root / "empty").mkdir()
    for module in ("evil", "evil.models", "empty"):
        app = ship_app(ship, {"npu": module})
        assert outcomes(app.explain("a")) == [NPU_MISSING]


def test_companions_in_zip_archives_are_opened(
    ship: Shipper, install: Callable[..., Path], from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    folder = install("my_cpu", cpu=CPU)
    ship_app(ship)
    app = from_zip()
    with zipfile.ZipFile(tmp_path / "0.zip", "a") as archive:
        for path in folder.rglob("*"):
            archive.write(path, f"my_cpu/{path.relative_to(folder).as_posix()}")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    importlib.invalidate_caches()
    for verify in (False, True):
        assert outcomes(app.explain("a", verify=verify))[1] == ("cpu", "opened")


def test_an_editable_install_opens_the_source_for_the_cpu(
    ship: Shipper, install: Callable[..., Path]
) -> None:
    targets = {"npu": "QNNExecutionProvider", "cpu": CPU_EP}
    modules = {**MODULES, "source": ""}
    model = component({"source": SOURCE}, targets=targets, modules=modules, identity="1")
    app = ship.write({"a": model}, COMPANIONS, layout="installed")
    assert outcomes(app.explain("a")) == [NPU_MISSING, ("source", "opened")]
    assert outcomes(app.explain("a", target="cpu")) == [("source", "opened")]
    install("my_npu", npu=NPU)
    assert "no_such_ep" in app.explain("a")[0].reason


def test_a_runner_takes_the_sizes_of_companions(
    ship: Shipper, install: Callable[..., Path], tmp_path: Path
) -> None:
    save(network(2), tmp_path / "my_cpu/a/cpu/a_optimized.onnx")
    inputs = [{"name": "x", "dtype": "float32", "shape": [2, 1, 8, 8]}]
    about = CPU["additional_metadata"]["hatch-epcontext"]
    two = {**CPU, "additional_metadata": {"hatch-epcontext": {**about, "inputs": inputs}}}
    install("my_cpu", cpu=two)
    app = ship_app(ship, {**MODULES, "source": ""}, source=SOURCE)
    runner = app.runner("a")
    with pytest.warns(UserWarning, match="'a' runs on source"):
        assert runner.run(None, {"x": np.ones((5, 1, 8, 8), np.float32)})[0].shape == (5, 10)
    runs = [attempt.reason.split(", ")[1] for attempt in runner.explain()[1:]]
    assert runs == ["runs: 2", "runs: 1"]

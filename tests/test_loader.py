"""The shipped module, with the real onnxruntime; only hardware that is not there is made up."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import logging
import shutil
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from hatch_epcontext.manifest import loader as loader_file
from hatch_epcontext.providers import PROVIDERS
from tests.conftest import needs_qnn
from tests.models import network, save

X = {"x": np.ones((1, 1, 8, 8), np.float32)}

CPU = {
    "target": "cpu",
    "product": "optimized",
    "ep": "CPUExecutionProvider",
    "device": "cpu",
    "device_filter": {},
    "policy": None,
    "plugin": None,
    "model_file": "a/cpu/a_optimized.onnx",
    "compatibility_string": "",
    "session_options": {"session.intra_op_num_threads": "1"},
    "provider_options": {},
    "sharing": None,
}
NPU = {
    **CPU,
    "target": "npu",
    "product": "context",
    "ep": "SomeExecutionProvider",
    "device": "npu",
    "plugin": {"module": "no_such_ep", "package": "no-such-ep", "registration_name": "Some"},
    "model_file": "a/npu/a_ctx.onnx",
    "compatibility_string": "v1",
    "session_options": {},
}

Ship = Callable[..., Any]


@pytest.fixture
def ship(tmp_path: Path) -> Ship:
    """Make a shipped package with the given targets, and import it."""

    def shipped(*targets: dict[str, Any], source: str | None = "a/source/a.onnx") -> ModuleType:
        folder = tmp_path / "shipped"
        for file in ("a/source/a.onnx", "a/cpu/a_optimized.onnx"):
            save(network(), folder / file)
        model = {"source": {"model_file": source}, "targets": targets}
        (folder / "epcontext.json").write_text(
            json.dumps({"models": {"a": model}}), encoding="utf-8"
        )
        (folder / "__init__.py").write_bytes(loader_file().read_bytes())
        spec = importlib.util.spec_from_file_location("shipped", folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return shipped


def told(steps: list[Any]) -> list[tuple[str, str]]:
    return [(step.target, step.outcome) for step in steps]


def test_the_first_target_that_can_be_opened_is(ship: Ship) -> None:
    app = ship(CPU)
    session = app.load("a")
    assert isinstance(session, onnxruntime.InferenceSession)
    assert session.run(None, X)[0].shape == (1, 10)
    assert app.target_of(session) == "cpu"
    assert app.models() == ["a"]
    assert told(app.explain("a")) == [("cpu", "opened"), ("source", "not tried")]


def test_without_the_eps_package_the_source_is_opened_and_the_reason_told(
    ship: Ship, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(NPU)
    with caplog.at_level(logging.INFO):
        session = app.load("a")
    assert app.target_of(session) == "source"
    assert "a on npu: skipped, no-such-ep is not installed" in caplog.text
    npu, source = app.explain("a")
    assert str(npu).startswith("npu: skipped, no-such-ep is not installed")
    assert str(source) == "source: opened, CPUExecutionProvider on cpu"


def test_a_library_that_cannot_be_loaded_is_a_reason(
    ship: Ship, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libnothing.so"
    library.write_text("not a library", encoding="utf-8")
    (tmp_path / "broken_ep.py").write_text(
        f"def get_library_path(): return {str(library)!r}\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = ship({**NPU, "plugin": {**NPU["plugin"], "module": "broken_ep"}})  # type: ignore[dict-item]
    npu, source = app.explain("a")
    assert npu.outcome == "skipped"
    assert "the library of no-such-ep cannot be loaded" in npu.reason
    assert source.outcome == "opened"


def test_a_broken_file_is_a_failure_and_the_next_is_tried(
    ship: Ship, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(CPU)
    (Path(app.__file__).parent / "a" / "cpu" / "a_optimized.onnx").write_bytes(b"broken")
    session = app.load("a")
    assert app.target_of(session) == "source"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a on cpu: failed, InvalidProtobuf" in warning.getMessage()


def test_one_target_may_be_asked_for_and_is_not_replaced(ship: Ship) -> None:
    app = ship(CPU, NPU)
    assert app.target_of(app.load("a", target="source")) == "source"
    with pytest.raises(app.LoadError, match=r"cannot be opened here:\n  npu: skipped, no-such-ep"):
        app.load("a", target="npu")


def test_one_kind_of_device_may_be_asked_for_and_is_not_replaced(ship: Ship) -> None:
    app = ship(NPU, CPU)
    assert app.target_of(app.load("a", device="cpu")) == "cpu"
    with pytest.raises(app.LoadError) as raised:
        app.load("a", device="npu")
    assert "source: skipped, it is for the cpu, and npu was asked for" in str(raised.value)


def test_names_that_are_not_there_are_told_with_those_that_are(ship: Ship) -> None:
    app = ship(CPU)
    with pytest.raises(app.LoadError, match=r"no model 'aa' here\. Did you mean 'a'"):
        app.load("aa")
    with pytest.raises(app.LoadError, match="There are: cpu, source"):
        app.explain("a", target="gpu")


def test_a_source_that_was_not_shipped_is_no_fallback(ship: Ship) -> None:
    app = ship(NPU, source=None)
    with pytest.raises(app.LoadError, match="source: skipped, the source model is not shipped"):
        app.load("a")


def test_the_apps_own_session_options_count(ship: Ship) -> None:
    app = ship(CPU)
    options = onnxruntime.SessionOptions()
    options.logid = "mine"
    app.load("a", session_options=options)
    assert options.get_session_config_entry("session.intra_op_num_threads") == "1"


def test_a_function_makes_fresh_session_options_for_each_target(ship: Ship) -> None:
    made = []

    def make() -> onnxruntime.SessionOptions:
        made.append(onnxruntime.SessionOptions())
        return made[-1]

    app = ship(CPU)
    (Path(app.__file__).parent / "a" / "cpu" / "a_optimized.onnx").write_bytes(b"broken")
    app.load("a", session_options=make)
    assert len(made) == 2


def test_sessions_may_be_opened_at_once(ship: Ship) -> None:
    app = ship(NPU, CPU)
    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(app.load, ["a"] * 16))
    assert {app.target_of(session) for session in sessions} == {"cpu"}


def device(kind: str, vendor: str = "Some", **metadata: str) -> SimpleNamespace:
    hardware = SimpleNamespace(
        type=SimpleNamespace(name=kind), vendor=vendor, vendor_id=1, metadata={}
    )
    return SimpleNamespace(ep_name="SomeExecutionProvider", ep_metadata=metadata, device=hardware)


@pytest.mark.parametrize(
    ("there", "asked", "reason"),
    [
        (["CPU"], None, "finds no npu here, only cpu (device='any' would take it)"),
        (["CPU", "GPU"], "npu", "finds no npu here, only cpu, gpu"),
        ([], None, "finds no npu here"),
        ([], "any", "finds no device here"),
    ],
)
def test_a_device_that_is_not_there_is_a_reason(
    ship: Ship, monkeypatch: pytest.MonkeyPatch, there: list[str], asked: str, reason: str
) -> None:
    app = ship(NPU)
    monkeypatch.setattr(app, "_offered", lambda ort, entry: [device(kind) for kind in there])
    npu = app.explain("a", device=asked)[0]
    assert npu.outcome == "skipped"
    assert reason in npu.reason


def test_an_ep_that_says_it_is_unsupported_is_believed(
    ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(NPU)
    monkeypatch.setattr(app, "_offered", lambda ort, entry: [device("NPU")])
    monkeypatch.setattr(app, "_compatibility", lambda devices, text: "EP_UNSUPPORTED")
    npu, source = app.explain("a")
    assert npu.outcome == "skipped"
    assert "does not support what it was compiled for" in npu.reason
    assert source.outcome == "opened"


def test_the_wanted_device_comes_before_any_other(ship: Ship) -> None:
    app = ship(NPU)
    devices = [device("CPU"), device("NPU")]
    for asked in ("npu", "any"):
        app._offered = lambda ort, entry: devices
        assert app._devices(onnxruntime, NPU, asked) == [devices[1]]


def test_devices_that_are_other_than_what_was_compiled_for_are_passed_over(ship: Ship) -> None:
    app = ship(NPU)
    old, new = device("NPU", platform="4000"), device("NPU", platform="5010")
    silent, other = device("NPU"), device("NPU", vendor="Another")
    app._offered = lambda ort, entry: [old, new, silent, other]
    entry = {**NPU, "device_filter": {"platform": "5010", "vendor": "SOME"}}
    # What a device does not tell of itself is no reason against it.
    assert app._devices(onnxruntime, entry, "npu") == [new, silent]


def test_an_ep_that_is_no_part_of_this_onnxruntime_is_a_reason(ship: Ship) -> None:
    gpu = {**CPU, "target": "amd", "ep": "MIGraphXExecutionProvider", "device": "gpu"}
    amd, _ = ship(gpu).explain("a")
    assert amd.outcome == "skipped"
    assert amd.reason.endswith("has no MIGraphXExecutionProvider")


def test_an_ep_that_onnxruntime_left_out_is_a_reason(ship: Ship) -> None:
    app = ship(CPU)
    session = app.load("a", target="cpu")
    with pytest.raises(app._Skip, match="CUDAExecutionProvider is not in the session"):
        app._see_that_it_has(session, "CUDAExecutionProvider")
    app._see_that_it_has(session, "CPUExecutionProvider")


def test_a_library_without_a_package_is_for_the_app_to_register(ship: Ship) -> None:
    plugin = {"module": "", "package": "its library", "registration_name": "Some", "path": ""}
    npu, _ = ship({**NPU, "plugin": plugin}).explain("a")
    assert npu.outcome == "skipped"
    assert "register_execution_provider_library before" in npu.reason


@needs_qnn
def test_a_policy_opens_the_ep_with_its_options(ship: Ship, tmp_path: Path) -> None:
    from hatch_epcontext.protocol import ModelSpec
    from hatch_epcontext.worker.compile import compile_job
    from tests.worker.test_compile import X_ELITE, compile_request, target

    source = save(network(1), tmp_path / "models" / "a.onnx")
    request = compile_request(ModelSpec("a", str(source), "m"), target("qnn", X_ELITE), tmp_path)
    compile_job(request)
    shutil.copytree(request.folder, tmp_path / "shipped" / "a" / "npu")
    plugin = PROVIDERS["qnn"].plugin
    assert plugin is not None
    entry = {
        **NPU,
        "ep": "QNNExecutionProvider",
        "plugin": dataclasses.asdict(plugin),
        "compatibility_string": "",
        "provider_options": {"backend_type": "htp"},
        "policy": "prefer-npu",
    }
    app = ship(entry)
    (npu, _) = app.explain("a", device="any")
    assert str(npu) == "npu: opened, QNNExecutionProvider, by the policy prefer-npu"
    assert app.load("a", device="any").run(None, X)[0].shape == (1, 10)
    # The EP's own word when it gets no backend.
    without = {**entry, "provider_options": {}}
    assert ship(without).explain("a", device="any")[0].outcome == "failed"
    opened = ship(without).load("a", device="any", provider_options={"backend_type": "htp"})
    assert opened.get_providers()[0] == "QNNExecutionProvider"


def test_sessions_that_share_weights_keep_those_before_them(ship: Ship) -> None:
    sharing = {"group": "g", "members": ["a", "b"], "saved": 1, "needs_device": True}
    app = ship({**CPU, "sharing": sharing}, {**CPU, "target": "other"})
    first = weakref.ref(app.load("a"))
    assert first() is None
    kept = app.load("a")
    first = weakref.ref(kept)
    second = app.load("a")
    apart = app.load("a", target="other")
    del kept
    assert first() is not None, "what was opened first has to outlive the second"
    assert app._before[second] == (first(),)
    assert apart not in app._before
    del second
    gc.collect()
    assert first() is None


def test_a_folder_in_the_users_cache_is_made(
    ship: Ship, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(sys, "platform", "linux")
    app = ship(CPU)
    name = app.__name__.split(".")[0]
    assert app._in_user_cache("{user-cache}/rtx") == str(tmp_path / "caches" / name / "rtx")
    assert (tmp_path / "caches" / name / "rtx").is_dir()
    assert app._in_user_cache("plain") == "plain"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert app._in_user_cache("{user-cache}") == str(tmp_path / "local" / name)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert Path(app._in_user_cache("{user-cache}")) == tmp_path / "Library" / "Caches" / name


def test_what_cannot_be_simulated_is_not_tried(ship: Ship) -> None:
    """The simulator of QNN crashes over contexts that share weights, and the app with it."""
    sharing = {"group": "g", "members": ["a", "b"], "saved": 1, "needs_device": True}
    app = ship({**NPU, "sharing": sharing})
    app._offered = lambda ort, entry: [device("CPU")]
    npu, source = app.explain("a", device="any")
    assert str(npu) == "npu: skipped, contexts that share weights need the npu itself"
    assert source.outcome == "opened"
    app._offered = lambda ort, entry: [device("CPU"), device("NPU")]
    assert [app._kind(each) for each in app._devices(onnxruntime, NPU, "any")] == ["npu"]

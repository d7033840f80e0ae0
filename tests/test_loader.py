"""The shipped module, with the real onnxruntime; only hardware that is missing is simulated."""

from __future__ import annotations

import dataclasses
import gc
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

from hatch_epcontext.errors import Key
from hatch_epcontext.package.manifest import loader_file
from hatch_epcontext.providers import PROVIDERS
from tests.conftest import needs_qnn
from tests.models import network, save

X = {"x": np.ones((1, 1, 8, 8), np.float32)}

CPU: dict[str, Any] = {
    "target": "cpu",
    "product": "optimized",
    "plugin": None,
    "model_file": "a/cpu/a_optimized.onnx",
    "compatibility_string": "",
    "settings": {
        "ep": "CPUExecutionProvider",
        "device": "cpu",
        "device_filter": {},
        "policy": None,
        "session_options": {"session.intra_op_num_threads": "1"},
    },
    "load_options": {},
    "sharing": None,
}
NPU: dict[str, Any] = {
    **CPU,
    "target": "npu",
    "product": "context",
    "plugin": {"module": "no_such_ep", "package": "no-such-ep", "registration_name": "Some"},
    "model_file": "a/npu/a_ctx.onnx",
    "compatibility_string": "v1",
    "settings": {
        "ep": "SomeExecutionProvider",
        "device": "npu",
        "device_filter": {},
        "policy": None,
        "session_options": {},
    },
}

Ship = Callable[..., Any]


def with_settings(entry: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """``entry`` with some of its settings replaced."""
    return {**entry, "settings": {**entry["settings"], **settings}}


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Return a function that creates a shipped package with the given targets, and imports it."""

    def shipped(*targets: dict[str, Any], source: str | None = "a/source/a.onnx") -> ModuleType:
        folder = tmp_path / "shipped"
        for file in ("a/source/a.onnx", "a/cpu/a_optimized.onnx"):
            save(network(), folder / file)
        model = {"source": {"model_file": source}, "targets": targets}
        (folder / "epcontext.json").write_text(
            json.dumps({"models": {"a": model}}), encoding="utf-8"
        )
        (folder / "__init__.py").write_bytes(loader_file().read_bytes())
        module = ModuleType("shipped")
        module.__file__ = str(folder / "__init__.py")
        # With the name of the original file, so that coverage counts for it.
        code = compile(loader_file().read_text("utf-8"), str(loader_file()), "exec")
        monkeypatch.setitem(sys.modules, "shipped", module)
        exec(code, vars(module))
        return module

    return shipped


def outcomes(steps: list[Any]) -> list[tuple[str, str]]:
    return [(step.target, step.outcome) for step in steps]


def test_the_first_target_that_can_be_opened_is_opened(ship: Ship) -> None:
    app = ship(CPU)
    session = app.load("a")
    assert isinstance(session, onnxruntime.InferenceSession)
    assert session.run(None, X)[0].shape == (1, 10)
    assert app.target_of(session) == "cpu"
    assert app.models() == ["a"]
    assert outcomes(app.explain("a")) == [("cpu", "opened"), ("source", "not tried")]


def test_without_the_eps_package_the_source_is_opened_and_the_reason_logged(
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


def test_an_outcome_is_an_enum_member_that_equals_its_text(ship: Ship) -> None:
    app = ship(CPU)
    cpu, source = app.explain("a")
    assert cpu.outcome is app.Outcome.OPENED
    assert cpu.outcome == "opened"
    assert source == ("source", "not tried", None)
    assert str(source) == "source: not tried"


def test_a_target_whose_library_cannot_be_loaded_is_skipped(
    ship: Ship, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libnothing.so"
    library.write_text("not a library", encoding="utf-8")
    (tmp_path / "broken_ep.py").write_text(
        f"def get_library_path(): return {str(library)!r}\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = ship({**NPU, "plugin": {**NPU["plugin"], "module": "broken_ep"}})
    npu, source = app.explain("a")
    assert npu.outcome == "skipped"
    assert "the library of no-such-ep cannot be loaded" in npu.reason
    assert source.outcome == "opened"


def test_a_broken_file_is_a_failure_and_the_next_target_is_tried(
    ship: Ship, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(CPU)
    (Path(app.__file__).parent / "a" / "cpu" / "a_optimized.onnx").write_bytes(b"broken")
    session = app.load("a")
    assert app.target_of(session) == "source"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a on cpu: failed, InvalidProtobuf" in warning.getMessage()


def test_a_requested_target_has_no_fallback(ship: Ship) -> None:
    app = ship(CPU, NPU)
    assert app.target_of(app.load("a", target="source")) == "source"
    with pytest.raises(app.LoadError, match=r"on this machine:\n  npu: skipped, no-such-ep"):
        app.load("a", target="npu")


def test_a_requested_device_has_no_fallback(ship: Ship) -> None:
    app = ship(NPU, CPU)
    assert app.target_of(app.load("a", device="cpu")) == "cpu"
    with pytest.raises(app.LoadError) as raised:
        app.load("a", device="npu")
    assert "source: skipped, it is for the cpu, and device='npu' was requested" in str(raised.value)


def test_an_unknown_name_is_an_error_that_lists_the_known_names(ship: Ship) -> None:
    app = ship(CPU)
    with pytest.raises(app.LoadError, match=r"unknown model 'aa'\. Did you mean 'a'"):
        app.load("aa")
    with pytest.raises(app.LoadError, match="Known: cpu, source"):
        app.explain("a", target="gpu")


def test_a_source_that_is_not_shipped_is_skipped(ship: Ship) -> None:
    app = ship(NPU, source=None)
    reason = "source: skipped, the package does not contain the source model"
    with pytest.raises(app.LoadError, match=reason):
        app.load("a")


def test_the_targets_settings_are_added_to_the_apps_session_options(ship: Ship) -> None:
    app = ship(CPU)
    options = onnxruntime.SessionOptions()
    options.logid = "mine"
    app.load("a", session_options=options)
    assert options.get_session_config_entry("session.intra_op_num_threads") == "1"


def test_a_function_creates_session_options_for_each_target(ship: Ship) -> None:
    made = []

    def make() -> onnxruntime.SessionOptions:
        made.append(onnxruntime.SessionOptions())
        return made[-1]

    app = ship(CPU)
    (Path(app.__file__).parent / "a" / "cpu" / "a_optimized.onnx").write_bytes(b"broken")
    app.load("a", session_options=make)
    assert len(made) == 2


def test_sessions_can_be_opened_in_several_threads(ship: Ship) -> None:
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
    ("offered", "requested", "reason"),
    [
        (["CPU"], None, "finds no npu, only cpu (device='any' accepts it)"),
        (["CPU", "GPU"], "npu", "finds no npu, only cpu, gpu"),
        ([], None, "finds no npu on this machine"),
        ([], "any", "finds no device on this machine"),
    ],
)
def test_a_target_whose_device_is_missing_is_skipped(
    ship: Ship, monkeypatch: pytest.MonkeyPatch, offered: list[str], requested: str, reason: str
) -> None:
    app = ship(NPU)
    monkeypatch.setattr(app, "_offered", lambda ort, entry: [device(kind) for kind in offered])
    npu = app.explain("a", device=requested)[0]
    assert npu.outcome == "skipped"
    assert reason in npu.reason


def test_a_target_that_its_ep_does_not_support_is_skipped(
    ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(NPU)
    monkeypatch.setattr(app, "_offered", lambda ort, entry: [device("NPU")])
    monkeypatch.setattr(app, "_compatibility", lambda devices, text: "EP_UNSUPPORTED")
    npu, source = app.explain("a")
    assert npu.outcome == "skipped"
    assert "cannot run this compiled model" in npu.reason
    assert source.outcome == "opened"


def test_the_targets_own_device_is_preferred(ship: Ship) -> None:
    app = ship(NPU)
    devices = [device("CPU"), device("NPU")]
    for requested in ("npu", "any"):
        app._offered = lambda ort, entry: devices
        assert app._devices(onnxruntime, NPU, requested) == [devices[1]]


def test_devices_that_the_device_filter_excludes_are_not_used(ship: Ship) -> None:
    app = ship(NPU)
    old, new = device("NPU", platform="4000"), device("NPU", platform="5010")
    silent, other = device("NPU"), device("NPU", vendor="Another")
    app._offered = lambda ort, entry: [old, new, silent, other]
    entry = with_settings(NPU, device_filter={"platform": "5010", "vendor": "SOME"})
    # A device that does not report a property passes.
    assert app._devices(onnxruntime, entry, "npu") == [new, silent]


def test_a_target_whose_ep_this_onnxruntime_does_not_contain_is_skipped(ship: Ship) -> None:
    gpu = with_settings(CPU, ep="MIGraphXExecutionProvider", device="gpu")
    amd, _ = ship({**gpu, "target": "amd"}).explain("a")
    assert amd.outcome == "skipped"
    assert amd.reason.endswith("does not contain MIGraphXExecutionProvider")


def test_a_session_without_the_targets_ep_is_not_used(ship: Ship) -> None:
    app = ship(CPU)
    session = app.load("a", target="cpu")
    with pytest.raises(app._SkipTargetError, match="opened without CUDAExecutionProvider"):
        app._check_has_ep(session, "CUDAExecutionProvider")
    app._check_has_ep(session, "CPUExecutionProvider")


def test_the_app_has_to_register_a_library_without_a_package(ship: Ship) -> None:
    plugin = {"module": "", "package": "its library", "registration_name": "Some", "path": ""}
    npu, _ = ship({**NPU, "plugin": plugin}).explain("a")
    assert npu.outcome == "skipped"
    assert "register_execution_provider_library first" in npu.reason


@needs_qnn
def test_a_policy_opens_the_ep_with_its_options(ship: Ship, tmp_path: Path) -> None:
    from hatch_epcontext.ipc.protocol import ModelSpec
    from hatch_epcontext.worker.compile import handle
    from tests.worker.test_compile import X_ELITE, compile_request, target

    source = save(network(1), tmp_path / "models" / "a.onnx")
    request = compile_request(ModelSpec("a", str(source), Key()), target("qnn", X_ELITE), tmp_path)
    handle(request)
    shutil.copytree(request.folder, tmp_path / "shipped" / "a" / "npu")
    plugin = PROVIDERS["qnn"].plugin
    assert plugin is not None
    entry = {
        **with_settings(NPU, ep="QNNExecutionProvider", policy="prefer-npu"),
        "plugin": dataclasses.asdict(plugin),
        "compatibility_string": "",
        "load_options": {"backend_type": "htp"},
    }
    app = ship(entry)
    (npu, _) = app.explain("a", device="any")
    assert str(npu) == "npu: opened, QNNExecutionProvider, by the policy prefer-npu"
    assert app.load("a", device="any").run(None, X)[0].shape == (1, 10)
    # Without a backend the EP itself raises an error.
    without = {**entry, "load_options": {}}
    assert ship(without).explain("a", device="any")[0].outcome == "failed"
    opened = ship(without).load("a", device="any", provider_options={"backend_type": "htp"})
    assert opened.get_providers()[0] == "QNNExecutionProvider"


def test_a_session_that_shares_weights_keeps_earlier_sessions_alive(ship: Ship) -> None:
    sharing = {"group": "g", "members": ["a", "b"], "saved": 1, "needs_device": True}
    app = ship({**CPU, "sharing": sharing}, {**CPU, "target": "other"})
    first = weakref.ref(app.load("a"))
    assert first() is None
    kept = app.load("a")
    first = weakref.ref(kept)
    second = app.load("a")
    apart = app.load("a", target="other")
    del kept
    assert first() is not None, "the first session has to outlive the second"
    assert app._earlier_sessions[second] == (first(),)
    assert apart not in app._earlier_sessions
    del second
    gc.collect()
    assert first() is None


def test_a_folder_in_the_users_cache_is_created(
    ship: Ship, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(sys, "platform", "linux")
    app = ship(CPU)
    name = app.__name__.split(".")[0]
    assert app._expand_user_cache("{user-cache}/rtx") == str(tmp_path / "caches" / name / "rtx")
    assert (tmp_path / "caches" / name / "rtx").is_dir()
    assert app._expand_user_cache("plain") == "plain"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert app._expand_user_cache("{user-cache}") == str(tmp_path / "local" / name)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert Path(app._expand_user_cache("{user-cache}")) == tmp_path / "Library" / "Caches" / name


def test_models_that_share_weights_are_not_opened_on_a_simulator(ship: Ship) -> None:
    """QNN's simulator crashes on contexts that share weights, and the app with it."""
    sharing = {"group": "g", "members": ["a", "b"], "saved": 1, "needs_device": True}
    app = ship({**NPU, "sharing": sharing})
    app._offered = lambda ort, entry: [device("CPU")]
    npu, source = app.explain("a", device="any")
    assert (
        str(npu) == "npu: skipped, models that share weights need a real npu, not a simulated one"
    )
    assert source.outcome == "opened"
    app._offered = lambda ort, entry: [device("CPU"), device("NPU")]
    assert [app._kind(each) for each in app._devices(onnxruntime, NPU, "any")] == ["npu"]

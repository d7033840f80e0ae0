"""The shipped module, with the real onnxruntime; only hardware that is missing is simulated."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import importlib.util
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from hatch_epcontext import _recompile, loader
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from hatch_epcontext.files import record_files
from hatch_epcontext.package.manifest import UNSEALED, seal
from hatch_epcontext.package.modules import loader_file
from hatch_epcontext.shipped import METADATA
from tests.conftest import needs_qnn, printed_json
from tests.models import network, of_any_rank, parsed, save, save_with_data

CPU_EP = "CPUExecutionProvider"
QNN_EP = "QNNExecutionProvider"
OPENVINO_EP = "OpenVINOExecutionProvider"
X = {"x": np.ones((1, 1, 8, 8), np.float32)}
Table = dict[str, Any]


def variant(
    folder: str, file: str, *, session_options: Mapping[str, str] | None = None, **ours: Any
) -> Table:
    """A variant as the build writes it; ``ours`` is added to its metadata."""
    settings = {
        "ep": CPU_EP,
        "device": "cpu",
        "device_filter": {},
        "session_options": {},
        "provider_options": {},
        "optimization": "basic",
        "embed": False,
        **ours.pop("settings", {}),
    }
    about = {
        "product": "optimized",
        "plugin": None,
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 1, 8, 8]}],
        "settings": settings,
        "load_options": {},
        "needs_device": False,
        "prepared": None,
        "sharing": None,
        **ours,
    }
    device = settings["device"]
    return {
        "variant_directory": folder,
        "ep": settings["ep"],
        **({"device": device} if device in ("npu", "gpu") else {}),
        "executor_info": {
            "ort": {
                "model_file": file,
                "session_options": dict(session_options or {}),
                "provider_options": {},
            }
        },
        "additional_metadata": {METADATA: about},
    }


def source_of(folder: str, file: str, shape: list[int | str]) -> Table:
    inputs = [{"name": "x", "dtype": "float32", "shape": shape}]
    return {
        "variant_directory": folder,
        "ep": CPU_EP,
        "executor_info": {"ort": {"model_file": file}},
        "additional_metadata": {METADATA: {"product": "source", "inputs": inputs}},
    }


def component(variants: Mapping[str, Table], name: str = "a", **ours: Any) -> Table:
    about = {"model": name, "source_sha256": "", **ours}
    return {"variants": dict(variants), "additional_metadata": {METADATA: about}}


CPU = variant("a/cpu", "a_optimized.onnx", session_options={"session.intra_op_num_threads": "1"})
NPU = variant(
    "a/npu",
    "a_ctx.onnx",
    session_options={"session.disable_model_compile": "1"},
    product="context",
    plugin={"module": "no_such_ep", "package": "no-such-ep", "registration_name": "Some"},
    settings={"ep": "SomeExecutionProvider", "device": "npu"},
)
SOURCE = source_of("a/source", "a.onnx", ["batch", 1, 8, 8])


def changed(table: Table, **ours: Any) -> Table:
    """A copy of a variant with some of its metadata replaced; ``settings`` are added to those it has."""
    result = copy.deepcopy(table)
    about = result["additional_metadata"][METADATA]
    about["settings"] = {**about["settings"], **ours.pop("settings", {})}
    about.update(ours)
    return result


QNN = changed(
    {**NPU, "ep": QNN_EP},
    plugin={
        "module": "onnxruntime_qnn",
        "package": "onnxruntime-qnn",
        "registration_name": QNN_EP,
    },
    prepared="prepared/a.onnx",
    settings={
        "ep": QNN_EP,
        "provider_options": {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"},
    },
)
QNN["executor_info"]["ort"]["provider_options"] = {"backend_type": "htp"}


def import_copy(file: Path) -> Any:
    """The loader as the module ``shipped``, whose file is ``file``."""
    module = ModuleType("shipped")
    module.__file__ = str(file)
    # Where `_recompile` is: coverage counts for the original.
    module.__package__ = "hatch_epcontext"
    sys.modules["shipped"] = module
    run_as(module)
    return module


def run_as(module: ModuleType) -> None:
    """Run the loader as ``module``, under the name of the original file, so that coverage counts for it."""
    exec(compile(loader_file().read_text("utf-8"), str(loader_file()), "exec"), vars(module))


def sealed(text: str) -> str:
    """The text of a manifest with its own sha256, where it has a place for that."""
    unsealed = re.sub(r'("manifest_sha256": )"[0-9a-f]{64}"', rf'\1"{UNSEALED}"', text)
    return seal(unsealed) if UNSEALED in unsealed else text


class Shipper:
    """Writes a package by hand, into the folder ``shipped``, and imports its loader."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "shipped"

    def __call__(self, source: Table | None = SOURCE, **variants: Table) -> Any:
        """A package with the model ``a``, its variants, and its source last."""
        if source is not None:
            variants = {**variants, "source": source}
        return self.write({"a": component(variants)})

    def write(self, components: Mapping[str, Any], **top: Any) -> Any:
        """A package with these components; ``top`` replaces keys of the manifest."""
        for file in ("a/source/a.onnx", "a/cpu/a_optimized.onnx", "a/npu/a_ctx.onnx"):
            if not (self.folder / file).is_file():
                save(network(), self.folder / file)
        (self.folder / "__init__.py").write_bytes(loader_file().read_bytes())
        shutil.copy(str(_recompile.__file__), self.folder)
        files = {
            name: {"size": each.size, "sha256": each.sha256}
            for name, each in record_files(self.folder).items()
            if name != "manifest.json"
        }
        about = {"generator": "hatch-epcontext 0", "files": files, "manifest_sha256": UNSEALED}
        manifest = {
            "schema_version": "1.0",
            "layout": "portable",
            "components": dict(components),
            "additional_metadata": {METADATA: about},
            **top,
        }
        self.manifest(manifest)
        return import_copy(self.folder / "__init__.py")

    def manifest(self, content: Any) -> None:
        """Write the manifest, which is a text, or sealed values as the build writes them."""
        text = content if isinstance(content, str) else sealed(json.dumps(content))
        self.folder.mkdir(exist_ok=True)
        (self.folder / "manifest.json").write_text(text, encoding="utf-8")

    def script(self, script: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
        """What ``script`` prints last as JSON, in a process that can import ``shipped``."""
        return self.finish(self.start(script, *arguments, env=env))

    def start(
        self, script: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=self.root,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def finish(self, process: subprocess.Popen[str]) -> Any:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        return printed_json(output)


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


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a context that QNN compiled, with the prepared model."""
    from tests.worker.actions.test_compile import X_ELITE, compile_request, run_compile, target

    folder = tmp_path_factory.mktemp("context")
    source = save(network(1), folder / "models" / "a.onnx")
    to = target("qnn", X_ELITE, recompile=True)
    request = compile_request(Model("a", source, Key()), to, folder)
    run_compile(request)
    return Path(request.folder)


@pytest.fixture(scope="module")
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


def outcomes(steps: list[Any]) -> list[tuple[str, str]]:
    return [(step.target, step.outcome) for step in steps]


# --- Targets


def test_the_first_target_that_can_be_opened_is_opened(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    session = app.load("a")
    assert isinstance(session, onnxruntime.InferenceSession)
    assert session.run(None, X)[0].shape == (1, 10)
    assert app.target_of(session) == "cpu"
    assert app.models() == ["a"]
    cpu, source = app.explain("a")
    assert cpu.outcome is app.Outcome.OPENED
    assert source == ("source", "not tried", None)
    assert str(source) == "source: not tried"


def test_without_the_eps_package_the_source_is_opened_and_the_reason_logged(
    ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(npu=NPU)
    with caplog.at_level(logging.INFO):
        session = app.load("a")
    assert app.target_of(session) == "source"
    assert "a on npu: skipped, no-such-ep is not installed" in caplog.text
    npu, source = app.explain("a")
    assert str(npu).startswith("npu: skipped, no-such-ep is not installed")
    assert str(source) == f"source: opened, {CPU_EP} on cpu"


def test_a_requested_target_or_device_has_no_fallback(ship: Shipper) -> None:
    app = ship(cpu=CPU, npu=NPU)
    assert app.target_of(app.load("a", target="source")) == "source"
    with pytest.raises(app.LoadError, match=r"on this machine:\n  npu: skipped, no-such-ep"):
        app.load("a", target="npu")
    assert app.target_of(app.load("a", device="cpu")) == "cpu"
    refused = "source: skipped, it is for the cpu, and device='npu' was requested"
    with pytest.raises(app.LoadError, match=refused):
        app.load("a", device="npu")


def test_without_a_fallback_the_source_is_not_opened_unless_it_is_named(ship: Shipper) -> None:
    app = ship(npu=NPU)
    with pytest.raises(app.LoadError, match="npu: skipped") as raised:
        app.load("a", fallback=None)
    assert "source" not in str(raised.value)
    assert outcomes(app.explain("a", fallback=None)) == [("npu", "skipped")]
    assert app.target_of(app.load("a", fallback=None, target="source")) == "source"
    app = ship(cpu=CPU)
    assert app.target_of(app.load("a", fallback=None)) == "cpu"


def test_a_source_that_is_not_shipped_is_no_target(ship: Shipper) -> None:
    app = ship(source=None, npu=NPU)
    assert outcomes(app.explain("a")) == [("npu", "skipped")]
    with pytest.raises(app.LoadError, match=r"Known: npu\."):
        app.load("a", target="source")


def test_a_model_without_targets_cannot_be_opened(ship: Shipper) -> None:
    app = ship(source=None)
    with pytest.raises(app.LoadError, match=r"'a' has no targets in .*shipped"):
        app.load("a")
    with pytest.raises(app.LoadError, match="'a' has no targets"), app.path("a"):
        pass


def test_an_unknown_name_is_an_error_that_lists_the_known_names(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    with pytest.raises(app.LoadError, match=r"unknown model 'aa'\. Known: a"):
        app.load("aa")
    with pytest.raises(app.LoadError, match="Known: cpu, source"):
        app.explain("a", target="gpu")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "NPU"}, "device"),
        ({"device": ""}, "device"),
        ({"fallback": "source"}, "fallback"),
        ({"fallback": False}, "fallback"),
        ({"target": 5}, "unknown target 5"),
        ({"package": "no\0where"}, "cannot be read"),
        ({"package": "\ud800"}, "cannot be read"),
        ({"shapes": {"y": (1, 1, 8, 8)}}, "'y'"),
        ({"shapes": {"x": (1, 8, 8)}}, "'x'"),
        ({"session_options": lambda: 5}, "AttributeError"),
    ],
)
def test_a_value_that_an_argument_does_not_take_is_a_load_error(
    ship: Shipper, arguments: Table, named: str
) -> None:
    app = ship(source=None, cpu=CPU)
    with pytest.raises(app.LoadError) as raised:
        app.load("a", **arguments)
    assert named in str(raised.value)


def test_explain_takes_what_load_takes_to_choose_a_target(ship: Shipper) -> None:
    app = ship(npu=NPU, cpu=CPU)
    assert outcomes(app.explain("a", target="cpu")) == [("cpu", "opened")]
    assert outcomes(app.explain("a", device="cpu", fallback=None)) == [
        ("npu", "skipped"),
        ("cpu", "opened"),
    ]
    (ship.folder / "a/cpu/a_optimized.onnx").write_bytes(b"x" * 100)
    _, cpu, source = app.explain("a", verify=True, shapes={"x": (1, 1, 8, 8)})
    assert (cpu.outcome, source.outcome) == ("failed", "opened")
    assert app.explain("a", package=ship.folder) == app.explain("a")
    with pytest.raises(app.LoadError, match="recompile = true"):
        app.explain("a", fallback="jit")
    with pytest.raises(TypeError):
        app.explain("a", devcie="npu")


# --- Session options


def test_settings_of_the_opened_target_alone_are_added_to_the_apps_session_options(
    ship: Shipper,
) -> None:
    app = ship(npu=NPU, cpu=CPU)
    options = onnxruntime.SessionOptions()
    options.logid = "mine"
    app.load("a", session_options=options)
    assert options.get_session_config_entry("session.intra_op_num_threads") == "1"
    with pytest.raises(RuntimeError, match="does not have"):
        options.get_session_config_entry("session.disable_model_compile")


def test_session_options_are_for_one_call_and_a_function_creates_them_for_each_target(
    ship: Shipper,
) -> None:
    app, options = ship(cpu=CPU), onnxruntime.SessionOptions()
    app.load("a", session_options=options)
    for call in (app.load, app.explain):
        with pytest.raises(app.LoadError, match="were used before"):
            call("a", session_options=options)
    made = []

    def make() -> onnxruntime.SessionOptions:
        made.append(onnxruntime.SessionOptions())
        return made[-1]

    damage(ship.folder / "a/cpu/a_optimized.onnx")
    for _ in range(2):
        assert app.target_of(app.load("a", session_options=make)) == "source"
    assert len(made) == 4


def test_options_are_passed_on_as_the_manifest_and_the_app_have_them(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"backend_path": "/opt/lib/x.so", "trt_profile_min_shapes": "x:1x1x8x8", "y": "../z"}
    of_ours = {"cache": "{user-cache}/rtx", "plugins": "{file}/1/a.so;{file}/2/b.so"}
    cpu = changed(CPU, load_options=of_ours)
    cpu["executor_info"]["ort"]["provider_options"] = options
    app = ship(cpu=cpu)
    used = []

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *arguments: Any, providers: Any, **named: Any) -> None:
            used.append(providers)
            super().__init__(*arguments, providers=providers, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    for target in ("cpu", "source"):
        app.load("a", target=target, provider_options={"y": True, "size": 5, "text": "x"})
    cache = app.user_folder() / "rtx"
    folder = opener(app, "cpu").variant.option_files
    plugins = f"{folder}/1/a.so;{folder}/2/b.so"
    given = {"cache": str(cache), "plugins": plugins, "y": "1", "size": "5", "text": "x"}
    assert used == [[(CPU_EP, {**options, **given})], [(CPU_EP, {})]]
    assert cache.is_dir()


@needs_qnn
def test_one_object_of_session_options_is_enough_for_the_fallback(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    options = onnxruntime.SessionOptions()
    # QNN was added to these options, and then could not open its context.
    session = app.load("a", device="any", session_options=options)
    assert app.target_of(session) == "source"
    assert session.get_providers() == [CPU_EP]


# --- Threads


def test_sessions_can_be_opened_in_several_threads(ship: Shipper) -> None:
    app = ship(npu=NPU, cpu=CPU)
    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(app.load, ["a"] * 16))
    assert {app.target_of(session) for session in sessions} == {"cpu"}


def test_models_that_share_weights_can_be_opened_in_several_threads(ship: Shipper) -> None:
    app = ship(cpu=changed(CPU, sharing={"group": "g", "members": ["a", "b"]}))
    # Threads change often, so that a set that changes while it is read is found out.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            kept = list(pool.map(app.load, ["a"] * 64))
    finally:
        sys.setswitchinterval(interval)
    (group,) = app._groups.values()
    assert len(group) == len(kept)


def test_a_session_that_shares_weights_keeps_earlier_sessions_alive(ship: Shipper) -> None:
    sharing = {"group": "g", "members": ["a", "b"]}
    app = ship(cpu=changed(CPU, sharing=sharing), other=CPU)
    first = weakref.ref(app.load("a"))
    assert first() is None
    kept = app.load("a")
    first = weakref.ref(kept)
    second = app.load("a")
    apart = app.load("a", target="other")
    third = app.load("a")
    # The sessions in C, of which the garbage collector clears no tuple.
    assert second.epcontext_earlier == (kept._sess,)
    assert set(third.epcontext_earlier) == {kept._sess, second._sess}
    assert not hasattr(apart, "epcontext_earlier")
    del kept, second, third
    gc.collect()
    assert first() is None
    assert not next(iter(app._groups.values()))


# --- Devices


def device(kind: str, vendor: str = "Some", **metadata: str) -> SimpleNamespace:
    hardware = SimpleNamespace(
        type=SimpleNamespace(name=kind), vendor=vendor, vendor_id=1, device_id=2, metadata={}
    )
    return SimpleNamespace(ep_name="SomeExecutionProvider", ep_metadata=metadata, device=hardware)


def only_variant(app: Any, target: str = "npu") -> Any:
    (found,) = (each for each in app._package(None).models["a"] if each.target == target)
    return found


def opener(app: Any, target: str = "npu", **request: Any) -> Any:
    given = {"device": None, "shapes": {}, "provider_options": {}, **request}
    return app.Opener(only_variant(app, target), app.Request(**given))


@pytest.mark.parametrize(
    ("offered", "requested", "reason"),
    [
        (["CPU"], None, "finds no npu, only cpu (device='any' accepts it)"),
        (["CPU", "GPU"], "npu", "finds no npu, only cpu, gpu"),
        ([], None, "finds no npu on this machine"),
        ([], "any", "finds no npu on this machine"),
    ],
)
def test_a_target_whose_device_is_missing_is_skipped(
    ship: Shipper, offered: list[str], requested: str, reason: str
) -> None:
    app = ship(npu=NPU)
    app.Opener._offered = lambda self: [device(kind) for kind in offered]
    npu = app.explain("a", device=requested)[0]
    assert npu.outcome == "skipped"
    assert reason in npu.reason


def test_the_targets_own_device_is_preferred(ship: Shipper) -> None:
    app = ship(npu=NPU)
    devices = [device("CPU"), device("NPU")]
    app.Opener._offered = lambda self: devices
    for requested in ("npu", "any"):
        assert opener(app, device=requested).find_devices() == [devices[1]]


def test_devices_that_the_device_filter_excludes_are_not_used(ship: Shipper) -> None:
    wanted = {"platform": "5010", "vendor": "SOME"}
    app = ship(npu=changed(NPU, settings={"device_filter": wanted}))
    old, new = device("NPU", platform="4000"), device("NPU", platform="5010")
    silent, other = device("NPU"), device("NPU", vendor="Another")
    app.Opener._offered = lambda self: [old, new, silent, other]
    # A device that does not report a property passes.
    assert opener(app, device="npu").find_devices() == [new, silent]


def test_models_that_share_weights_are_not_opened_on_a_simulator(ship: Shipper) -> None:
    """QNN's simulator refuses contexts that share weights."""
    sharing = {"group": "g", "members": ["a", "b"]}
    app = ship(npu=changed(NPU, sharing=sharing, needs_device=True))
    app.Opener._offered = lambda self: [device("CPU")]
    npu, source = app.explain("a", device="any")
    assert (npu.outcome, npu.reason.count("only cpu")) == ("skipped", 1)
    assert source.outcome == "opened"
    app.Opener._offered = lambda self: [device("CPU"), device("NPU")]
    found = opener(app, device="any").find_devices()
    assert [each.device.type.name for each in found] == ["NPU"]


@pytest.mark.parametrize(
    "error", [MemoryError("std::bad_alloc"), ValueError("basic_string::_M_create"), SystemError()]
)
def test_a_device_that_vanishes_between_listing_and_opening_is_a_failure(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    app = ship(npu=NPU)
    app.Opener._offered = lambda self: [device("NPU")]

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
        def add_provider_for_devices(self, devices: Any, options: Any) -> None:
            raise error

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    npu, source = app.explain("a")
    assert str(npu) == f"npu: failed, {type(error).__name__}: {error}"
    assert source.outcome == "opened"


def test_a_target_whose_ep_this_onnxruntime_does_not_contain_is_skipped(ship: Shipper) -> None:
    settings = {"ep": "MIGraphXExecutionProvider", "device": "gpu"}
    gpu = variant("a/cpu", "a_optimized.onnx", settings=settings)
    amd, _ = ship(amd=gpu).explain("a")
    assert amd.outcome == "skipped"
    assert "does not contain MIGraphXExecutionProvider" in amd.reason


def test_a_session_without_the_targets_ep_is_not_used(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime with CUDA but without its libraries: it logs that, and opens the session."""
    cuda = variant("a/cpu", "a_optimized.onnx", settings={"ep": "CUDAExecutionProvider"})
    app = ship(gpu=cuda)

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *arguments: Any, providers: Any, **named: Any) -> None:
            super().__init__(*arguments, providers=[CPU_EP], **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    gpu, _ = app.explain("a", fallback="cpu")
    assert gpu.outcome == "skipped"
    assert "without CUDAExecutionProvider" in gpu.reason


def test_without_onnxruntime_the_reason_says_so(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(cpu=CPU)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(app.LoadError, match=r"cpu: skipped, .*onnxruntime"):
        app.load("a")


def test_an_onnxruntime_without_plugins_opens_only_its_own_eps(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(npu=NPU, cpu=CPU)
    monkeypatch.delattr(onnxruntime, "get_ep_devices")
    npu, cpu, _ = app.explain("a")
    assert (npu.outcome, cpu.outcome) == ("skipped", "opened")
    assert "is too old for SomeExecutionProvider" in npu.reason


# --- Registration


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


@needs_qnn
def test_a_context_runs_on_the_simulator_only_on_request(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    npu, source = app.explain("a")
    assert "finds no npu, only cpu (device='any' accepts it)" in npu.reason
    assert source.outcome == "opened"
    session = app.load("a", device="any")
    assert app.target_of(session) == "npu"
    difference = session.run(None, X)[0] - app.load("a").run(None, X)[0]
    assert np.abs(difference).max() < 0.05


# --- Compatibility

COMPATIBILITY = "onnxruntime.capi._pybind_state.get_model_compatibility_for_ep_devices"


def test_a_context_for_another_version_of_openvino_is_skipped(
    openvino: tuple[Shipper, Table],
) -> None:
    ship, entry = openvino
    app = ship(openvino=entry)
    assert entry["compatibility_string"]
    assert outcomes(app.explain("a")) == [("openvino", "opened"), ("source", "not tried")]
    entry["compatibility_string"] = "of another version"
    first, source = ship(openvino=entry).explain("a")
    assert (first.target, first.outcome) == ("openvino", "skipped")
    assert first.reason.endswith("of another version")
    entry["additional_metadata"]["hatch-epcontext"]["settings"]["compute_capabilities"] = ["8.9"]
    assert ship(openvino=entry).explain("a")[0].reason.endswith("for 8.9")
    assert source.outcome == "opened"
    # The EP gives no answer, and ONNX Runtime 1.23 cannot ask.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(COMPATIBILITY, lambda devices, text: int("not implemented"))
        assert app.explain("a")[0].outcome == "opened"
        patch.delattr(COMPATIBILITY)
        assert app.explain("a")[0].outcome == "opened"
    entry["compatibility_string"] = None
    assert ship(openvino=entry).explain("a")[0].outcome == "opened"


@needs_qnn
def test_qnn_is_never_asked_about_compatibility(
    qnn: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can crash the process."""
    asked: list[str] = []
    monkeypatch.setattr(COMPATIBILITY, lambda devices, text: asked.append(text))
    app = qnn(npu={**QNN, "compatibility_string": "of another version"})
    assert app.target_of(app.load("a", device="any")) == "npu"
    assert asked == []


# --- Files


def damage(path: Path, how: str = "altered") -> None:
    """Damage a file; ``altered`` keeps its size."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "truncated":
        path.write_bytes(content[:-10])
    elif how == "longer":
        path.write_bytes(content + b"x")
    else:
        path.write_bytes(bytes(byte ^ 0xFF for byte in content))


def test_a_broken_model_is_a_failure_and_the_next_target_is_tried(
    ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(cpu=CPU)
    damage(ship.folder / "a/cpu/a_optimized.onnx")
    session = app.load("a")
    assert app.target_of(session) == "source"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a on cpu: failed, InvalidProtobuf" in warning.getMessage()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("missing", "is missing"),
        ("a folder", "bytes, and"),
        ("truncated", "bytes, and"),
        ("longer", "bytes, and"),
        ("altered", "was changed: its sha256 differs from the recorded one"),
        ("without its folder", ""),
    ],
)
@pytest.mark.parametrize("name", ["a/cpu/a_optimized.onnx", "a/cpu/weights.bin"])
def test_a_damaged_file_is_named(ship: Shipper, how: str, reason: str, name: str) -> None:
    (ship.folder / "a/cpu").mkdir(parents=True)
    (ship.folder / "a/cpu/weights.bin").write_bytes(b"weights of a model")
    app = ship(cpu=CPU)
    if how == "without its folder":
        name = "a/cpu/a_optimized.onnx"
        shutil.rmtree(ship.folder / "a/cpu")
        (ship.folder / "a/cpu").touch()
    else:
        damage(ship.folder / name, how)
    cpu, source = app.explain("a", verify=how == "altered")
    assert cpu.outcome == "failed"
    assert cpu.reason.startswith(f"{name} ")
    assert reason in cpu.reason
    assert source.outcome == "opened"
    if how != "altered":
        with pytest.raises(app.LoadError, match=f"{name} .*{reason}"), app.path("a"):
            pass


def test_a_file_of_another_target_does_not_matter(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    damage(ship.folder / "a/source/a.onnx", "missing")
    assert app.target_of(app.load("a", verify=True)) == "cpu"
    with pytest.raises(app.LoadError, match=r"a/source/a\.onnx is missing"):
        app.load("a", target="source")


def test_models_that_share_a_folder_are_checked_apart(ship: Shipper) -> None:
    folder = ship.folder / "group/cpu"
    for name in ("a", "b"):
        save(network(), folder / f"{name}.onnx")
    (folder / "a.bin").write_bytes(b"shared weights")
    app = ship.write(
        {
            name: component({"cpu": variant("group/cpu", f"{name}.onnx")}, name)
            for name in ("a", "b")
        }
    )
    assert app.models() == ["a", "b"]
    damage(ship.folder / "group/cpu/b.onnx", "truncated")
    assert app.target_of(app.load("a")) == "cpu"
    with pytest.raises(app.LoadError, match=r"group/cpu/b\.onnx has"):
        app.load("b")
    damage(ship.folder / "group/cpu/a.bin", "missing")
    with pytest.raises(app.LoadError, match=r"group/cpu/a\.bin is missing"):
        app.load("a")


def test_a_file_that_the_manifest_does_not_record_is_missing(ship: Shipper) -> None:
    app = ship(npu=variant("a/npu", "another.onnx"))
    npu, _ = app.explain("a")
    assert npu.outcome == "failed"
    assert npu.reason.startswith("a/npu/another.onnx is missing in ")


def test_a_package_that_changes_is_read_again(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    assert [step.target for step in app.explain("a")] == ["cpu", "source"]
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    manifest["components"]["another"] = manifest["components"].pop("a")
    del manifest["components"]["another"]["additional_metadata"]
    ship.manifest(manifest)
    assert app.models() == ["another"]
    (ship.folder / "manifest.json").unlink()
    with pytest.raises(app.LoadError, match=r"manifest\.json cannot be read"):
        app.models()


# --- Paths


def test_path_gives_the_files_of_a_target(ship: Shipper) -> None:
    app = ship(cpu=CPU, npu=NPU)
    damage(ship.folder / "a/npu/a_ctx.onnx", "missing")
    with app.path("a") as file:
        assert file == ship.folder / "a/cpu/a_optimized.onnx"
    with app.path("a", "source") as file:
        assert file == ship.folder / "a/source/a.onnx"
    with app.path("a", target="source", package=str(ship.folder)) as file:
        assert file.is_file()
    for arguments, message in (
        (("aa",), "unknown model 'aa'"),
        (("a", "gpu"), "unknown target 'gpu'"),
        (("a", "npu"), r"a/npu/a_ctx\.onnx is missing"),
    ):
        with pytest.raises(app.LoadError, match=message), app.path(*arguments):
            pass


def test_an_error_of_the_caller_of_path_stays_what_it_is(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    with pytest.raises(ZeroDivisionError), app.path("a"):
        _ = 1 / 0


def test_target_of_knows_only_sessions_of_this_module(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    foreign = onnxruntime.InferenceSession(ship.folder / "a/source/a.onnx", providers=[CPU_EP])
    with pytest.raises(KeyError):
        app.target_of(foreign)


# --- Zip archives


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


def unpacked(app: Any) -> list[Path]:
    """The folders in the user's cache with copies of files from the archive."""
    folder = app.user_folder() / "unpacked"
    return sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []


def test_a_model_is_opened_from_a_zip_archive(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    source = save_with_data(network(), ship.folder / "a/data/a.onnx")
    assert (source.parent / "network.data").is_file()
    ship(cpu=CPU, data=variant("a/data", "a.onnx"), npu=NPU)
    app = from_zip()
    assert app.models() == ["a"]
    for target in ("cpu", "data", "source"):
        for verify in (False, True):
            session = app.load("a", target=target, verify=verify)
            assert session.run(None, X)[0].shape == (1, 10)
            assert app.target_of(session) == target
            assert len(unpacked(app)) == 1
    assert not list((tmp_path / "temp").iterdir())


def again(app: Any) -> None:
    """As in another process."""
    app._read.cache_clear()
    app.user_folder.cache_clear()


def test_files_of_a_zip_archive_are_copied_once(ship: Shipper, from_zip: Callable[[], Any]) -> None:
    ship(cpu=CPU)
    app = from_zip()
    with app.path("a") as file:
        (folder,) = unpacked(app)
        assert file.is_relative_to(folder)
        first = file.stat()
    # So that nobody removes what is in use.
    os.utime(folder, (0, 0))
    again(app)
    with app.path("a") as file:
        assert file.stat() == first
    assert folder.stat().st_mtime > 0


def test_a_damaged_copy_of_a_file_from_a_zip_archive_is_made_again(
    ship: Shipper, from_zip: Callable[[], Any]
) -> None:
    ship(cpu=CPU)
    app = from_zip()
    with app.path("a") as file:
        content = file.read_bytes()
    file.write_bytes(content[:100])
    again(app)
    app.load("a", target="cpu")
    assert file.read_bytes() == content
    assert len(unpacked(app)) == 1
    # The size alone does not show it.
    damage(file)
    app.load("a", target="cpu", verify=True)
    assert file.read_bytes() == content
    for text in (None, "{}"):
        manifest = file.parents[2] / "manifest.json"
        manifest.unlink() if text is None else manifest.write_text(text)
        app.load("a", target="cpu")
    shutil.rmtree(file.parents[2])
    app.load("a", target="cpu")
    assert len(unpacked(app)) == 1


UNPACK = """
import sys
sys.path.insert(0, sys.argv[1])
from zipped import epcontext
print("ready", flush=True)
sys.stdin.read()
with epcontext.path("a") as file:
    print(file)
    file.read_bytes()
"""


def test_processes_that_copy_at_the_same_moment_get_one_whole_copy(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    (ship.folder / "a/cpu").mkdir(parents=True)
    (ship.folder / "a/cpu/weights.bin").write_bytes(random.Random(1).randbytes(5_000_000))
    ship(cpu=CPU)
    app = from_zip()
    (archive,) = tmp_path.glob("*.zip")
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = [sys.executable, "-c", UNPACK, str(archive)]
    processes: list[Any] = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for each in processes:
        assert each.stdout.readline() == "ready\n"
    for each in processes:
        each.stdin.close()
    found = set()
    for each in processes:
        found.add(each.stdout.read())
        assert each.wait() == 0
        each.stdout.close()
    (folder,) = unpacked(app)
    assert found == {f"{folder / 'a/cpu/a_optimized.onnx'}\n"}
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_copies_from_zip_archives_do_not_fill_the_disk(
    ship: Shipper, from_zip: Callable[[], Any]
) -> None:
    ship(cpu=CPU)
    app = from_zip()
    old = app.user_folder() / "unpacked" / "old"
    used = app.user_folder() / "unpacked" / "used"
    for each in (old, used):
        (each / "a").mkdir(parents=True)
    # Nobody has opened it for a long time.
    os.utime(old, (0, 0))
    app.load("a")
    assert used in unpacked(app)
    assert old not in unpacked(app)
    assert len(unpacked(app)) == 2


def test_without_a_cache_the_copies_live_as_long_as_the_process(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    ship(cpu=CPU)
    from_zip()
    (archive,) = tmp_path.glob("*.zip")
    (tmp_path / "home").write_text("a file", encoding="utf-8")
    variables = {"TMPDIR": str(tmp_path / "temp"), "TMP": str(tmp_path / "temp")}
    script = f"import sys; sys.path.insert(0, {str(archive)!r})\n{NO_CACHE}"
    used, copies = ship.script(script, str(tmp_path / "temp"), env=variables)
    assert (used, copies) == ("cpu", 1)
    assert not list((tmp_path / "temp").glob("epcontext-*"))


NO_CACHE = """
import json
from pathlib import Path
from zipped.epcontext import load, target_of
sessions = [load("a") for _ in range(3)]
print(json.dumps([target_of(sessions[0]), len(list(Path(sys.argv[1]).glob("epcontext-*")))]))
"""


def test_a_manifest_in_a_zip_archive_names_nothing_outside_of_the_cache(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs", encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in (theirs, theirs / "file")}
    outside = {"files": {"../../../x": {"size": 6, "sha256": "0" * 64}}}
    for layout, about in (
        ("portable", {"manifest_sha256": str(theirs)}),
        ("portable", {"manifest_sha256": f"../../../{theirs.name}"}),
        ("installed", outside),
    ):
        ship(cpu=CPU)
        manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
        manifest["additional_metadata"][METADATA].update(about)
        ship.manifest(json.dumps({**manifest, "layout": layout}))
        app = from_zip()
        refused = pytest.raises(app.LoadError, match=OUTSIDE)
        with refused if about is outside else contextlib.nullcontext():
            app.load("a")
        assert before == {path: path.stat().st_mtime_ns for path in before}
        importlib.invalidate_caches()


def test_a_damaged_zip_archive_is_a_load_error(
    ship: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    # Not compressible, so that it can be found in the archive.
    (ship.folder / "a/cpu").mkdir(parents=True)
    content = random.Random(1).randbytes(10_000)
    (ship.folder / "a/cpu/weights.bin").write_bytes(content)
    ship(cpu=CPU)
    app = from_zip()
    (archive,) = tmp_path.glob("*.zip")
    damaged = archive.read_bytes().replace(content[100:200], b"?" * 100)
    for broken in (damaged, damaged[:5000]):
        archive.write_bytes(broken)
        for call in (app.load, app.explain, lambda name: app.path(name).__enter__()):
            with pytest.raises(app.LoadError, match="cannot be read"):
                call("a")
        assert unpacked(app) == []


def test_an_installed_package_names_files_anywhere(ship: Shipper, tmp_path: Path) -> None:
    """As editable installs do; on Windows also on another drive."""
    one = save(network(), tmp_path / "elsewhere/one.onnx")
    save(network(), tmp_path / "two.onnx")
    variants = {
        "absolute": variant(".", str(one)),
        "folder": variant(str(one.parent), one.name),
        "parent": variant("..", "two.onnx"),
    }
    for target, each in variants.items():
        app = ship.write({"m": component({target: each}, "m")}, layout="installed")
        assert app.explain("m")[0].outcome == "opened", target
        app = ship.write({"m": component({target: each}, "m")})
        with pytest.raises(app.LoadError, match="outside of the package"):
            app.load("m")


def test_on_windows_a_drive_is_an_absolute_path() -> None:
    assert loader.join("a/b", "C:/models/m.onnx") == "C:/models/m.onnx"
    assert loader.join("a/b", "//server/share/m.onnx") == "//server/share/m.onnx"
    assert loader.join("a/b", "c/m.onnx") == "a/b/c/m.onnx"
    assert loader.join("", "c") == "c"


# --- Bad packages


BAD_TEXTS: dict[str, str | bytes] = {
    "empty": "",
    "other bytes": b'{"\xff',
    "text": "models: []",
    "a comment": '{"schema_version": "1.0"} // text',
    "deep": "[" * 100_000 + "]" * 100_000,
    "a list": "[]",
    "null": "null",
    "deep in an object": (
        '{"schema_version": "1.0", "components": ' + '{"a":' * 100_000 + "1" + "}" * 100_001
    ),
    "no schema": '{"components": {}}',
    "schema 2.0": '{"schema_version": "2.0", "new": 1}',
    "a float schema": '{"schema_version": 1.0}',
    "no components": '{"schema_version": "1.0"}',
}


@pytest.mark.parametrize("kind", BAD_TEXTS)
def test_a_manifest_that_cannot_be_read_is_a_load_error(ship: Shipper, kind: str) -> None:
    app = ship(cpu=CPU)
    # A mark of the encoding is no error.
    file = ship.folder / "manifest.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert app.models() == ["a"]
    bad = BAD_TEXTS[kind]
    file.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    calls: list[Callable[[], Any]] = [
        app.models,
        lambda: app.load("a"),
        lambda: app.explain("a"),
        lambda: app.path("a").__enter__(),
    ]
    for call in calls:
        with pytest.raises(app.LoadError) as raised:
            call()
        assert f"{file} cannot be read" in str(raised.value)


def test_a_folder_without_a_manifest_is_a_load_error(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(loader.LoadError, match=r"manifest\.json cannot be read") as raised:
            loader.load("a", package=folder)
        assert str(folder) in str(raised.value)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(loader.LoadError, match=r"manifest\.json cannot be read"):
        loader.models(tmp_path)
    with pytest.raises(loader.LoadError, match=r"manifest\.json cannot be read"):
        loader.models()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_the_place_of_a_file_is_not_read(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    name = "a/cpu/a_optimized.onnx"
    manifest["additional_metadata"][METADATA]["files"][name]["size"] = 0
    ship.manifest(manifest)
    for file in (name, "manifest.json"):
        (ship.folder / file).unlink()
        os.mkfifo(ship.folder / file)
        if file == name:
            assert app.explain("a", verify=True)[0].reason == f"{name} is no regular file"
    with pytest.raises(app.LoadError, match=r"manifest\.json cannot be read"):
        app.models()


def plugin_of(module: str) -> Table:
    return {"module": module, "package": "x", "registration_name": "x"}


V = ("components", "a", "variants", "cpu")
ORT = (*V, "executor_info", "ort")
OURS = ("additional_metadata", METADATA)
OUTSIDE = "is outside of the package"
# Where: the keys down to the value that is replaced; the value; what the message has.
BAD_VALUES: list[tuple[tuple[str, ...], Any, str]] = [
    (("components",), [], "components must be"),
    (("components", "a"), 5, "variants must be"),
    (("components", "a", "variants"), [], "variants must be"),
    (V, [], "executor_info must be"),
    (V, None, "executor_info must be"),
    ((*V, "variant_directory"), 5, "variant_directory must be"),
    *(
        ((*V, "variant_directory"), outside, OUTSIDE)
        for outside in ("", "..", "a/../../b", "/tmp", "C:\\x", "..\\x", "\\\\server\\share")
    ),
    # Other spellings of names that `verify` compares.
    *(((*V, "variant_directory"), each, OUTSIDE) for each in (".", "a/cpu/", "a//cpu", "a\\cpu")),
    *(((*V, "variant_directory"), each, OUTSIDE) for each in ("./C:/x", "a/.. /x", "a\\...\\x")),
    ((*V, "ep"), 5, "ep must be"),
    ((*V, "device"), ["npu"], "device must be"),
    ((*V, "executor_info"), "x", "executor_info must be"),
    (ORT, 5, "ort must be"),
    (ORT, {}, "model_file must be"),
    ((*ORT, "model_file"), "../../x", OUTSIDE),
    ((*ORT, "model_file"), "/etc/passwd", OUTSIDE),
    (OURS, 5, f"{METADATA} must be"),
    ((*OURS, "files"), [], "files must be"),
    ((*OURS, "files"), {"x": 5}, "size must be"),
    ((*OURS, "files"), {"x": {"size": "5", "sha256": ""}}, "size must be"),
    ((*OURS, "files"), {"x": {"size": True, "sha256": ""}}, "size must be"),
    ((*OURS, "files"), {"x": {"size": 5}}, "sha256 must be"),
    ((*OURS, "files"), {"a/cpu/../../x": {"size": 5, "sha256": ""}}, OUTSIDE),
    (("components", "a", *OURS), "x", f"{METADATA} must be"),
    (("components", "a", *OURS, "model"), ["a"], "model must be"),
    ((*V, *OURS), [], f"{METADATA} must be"),
    ((*V, *OURS, "inputs"), {}, "inputs must be"),
    ((*V, *OURS, "inputs"), [5], "name must be"),
    ((*V, *OURS, "inputs"), [{"name": "x"}], "shape must be"),
    ((*V, *OURS, "plugin"), "x", "plugin must be"),
    ((*V, *OURS, "prepared"), 5, "prepared must be"),
    ((*V, *OURS, "prepared"), "../../x", OUTSIDE),
    ((*V, *OURS, "settings"), 5, "settings must be"),
    ((*V, *OURS, "settings", "device"), 5, "device must be"),
]


def replaced(manifest: Any, where: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``manifest`` with ``new`` at the place ``where``."""
    if not where:
        return new
    result = copy.copy(manifest)
    old = manifest[where[0]] if isinstance(manifest, list) else manifest.get(where[0])
    result[where[0]] = replaced(old, where[1:], new)
    return result


def test_a_bad_value_in_the_manifest_is_a_load_error_that_names_its_key(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    for where, value_, named in BAD_VALUES:
        ship.manifest(replaced(manifest, where, value_))
        app._read.cache_clear()
        with pytest.raises(app.LoadError) as raised:
            app.load("a")
        assert named in str(raised.value), (where, value_)


def test_bad_options_in_the_manifest_are_a_failure_of_their_target(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    for where, value_, named in (
        ((*ORT, "session_options"), [], "session_options must be"),
        ((*ORT, "session_options"), {"x": 1}, "x must be"),
        ((*ORT, "provider_options"), {"x": None}, "x must be"),
        ((*V, *OURS, "load_options"), {"x": 1}, "x must be"),
        *(
            ((*V, *OURS, "load_options"), {"x": each}, "x must be a folder in {user-cache}")
            for each in ("{user-cache}/../x", "/tmp{user-cache}", "{user-cache}/a/../../../x")
        ),
    ):
        ship.manifest(replaced(manifest, where, value_))
        app._read.cache_clear()
        cpu, source = app.explain("a")
        assert (cpu.outcome, source.outcome) == ("failed", "opened")
        assert named in cpu.reason


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield where
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from places(item, (*where, key))


STRANGE: list[Any] = [
    None, True, -1, 2**70, 1e308, "", "x", "..", "\0", "a" * 5000, [], [None], {}, {"x": 1}, {"": {}},
]  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE, ids=repr)
def test_no_other_exception_leaves_the_module_whatever_the_manifest_says(
    ship: Shipper, strange: Any
) -> None:
    cpu = changed(
        CPU, load_options={"x": "{user-cache}/x"}, prepared="prepared/a.onnx",
        plugin={"module": "no_such_ep", "package": "x", "registration_name": "x"},
        sharing={"group": "g"},
    )  # fmt: skip
    plain = changed(CPU, load_options={"x": "{user-cache}/x"})
    app = ship.write({"a": component({"plain": plain, "cpu": cpu, "source": SOURCE})})
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    calls: list[Callable[[], Any]] = [
        lambda: app.load("a"),
        lambda: app.load("a", fallback="jit", target="cpu"),
        lambda: app.load("a", shapes={"x": (1, 1, 8, 8)}, device="any", verify=True),
        app.models,
    ]
    for where in places(manifest):
        ship.manifest(sealed(json.dumps(replaced(manifest, where, strange))))
        # The size of the manifest may be the same, and its time too.
        app._read.cache_clear()
        for call in calls:
            with contextlib.suppress(app.LoadError):
                call()
        with contextlib.suppress(app.LoadError), app.path("a"):
            pass


# --- Trust


def flipped(file: Path, positions: Iterable[int]) -> Iterator[int]:
    """Each position, while one bit of the byte there is flipped."""
    content = file.read_bytes()
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        yield position
    file.write_bytes(content)


def test_verify_finds_every_flipped_byte(ship: Shipper) -> None:
    """Every second byte of the manifest, each of a small file, and some of a model."""
    weights = ship.folder / "a/cpu/weights.bin"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(range(64)))
    app = ship(cpu=CPU)
    files = [ship.folder / "manifest.json", weights, ship.folder / "a/cpu/a_optimized.onnx"]
    files.append(ship.folder / "__init__.py")
    steps = {".json": 2, ".bin": 1, ".onnx": 200, ".py": 2000}
    tried = 0
    for file in files:
        size, step = file.stat().st_size, steps[file.suffix]
        for _ in flipped(file, [*range(0, size, step), size - 1]):
            app._read.cache_clear()
            with pytest.raises(app.LoadError):
                app.load("a", target="cpu", verify=True)
            tried += 1
    app._read.cache_clear()
    assert app.target_of(app.load("a", verify=True)) == "cpu"
    assert tried > 900


def test_verify_refuses_what_the_manifest_does_not_list(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    for name in ("a/cpu/weights.bin", "a/cpu/below/more.bin"):
        extra = ship.folder / name
        extra.parent.mkdir(exist_ok=True)
        extra.write_bytes(b"not listed")
        assert app.target_of(app.load("a")) == "cpu"
        (step, _) = app.explain("a", verify=True)
        assert step.reason == f"{name} is not in the manifest, and cannot be verified"
        extra.unlink()


def test_a_module_is_not_imported_for_an_ep_that_is_registered(
    ship: Shipper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spy_ep.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    app = ship(cpu=changed(CPU, plugin=plugin_of("spy_ep")))
    assert app.target_of(app.load("a")) == "cpu"
    assert "spy_ep" not in sys.modules


def test_the_app_gives_the_secrets_of_a_target(ship: Shipper) -> None:
    app = ship(cpu=changed(CPU, secrets=["encryption_key", "password"]))
    (step, source) = app.explain("a", provider_options={"password": "a"})
    assert (step.outcome, source.outcome) == ("skipped", "opened")
    assert step.reason == (
        "it was compiled with a secret or a file that only the app can give: "
        "load(..., provider_options={'encryption_key': ...})"
    )
    given = {"password": "a", "encryption_key": "b"}
    assert app.target_of(app.load("a", provider_options=given)) == "cpu"


# --- Shapes


SHAPES: dict[str, list[int | str]] = {
    "det.64": [1, 3, 64, 64],
    "det.32": [1, 3, 32, 32],
    "det.wide": [1, 3, 32, 96],
}


def identity(shape: list[int | str]) -> onnx.ModelProto:
    sizes = ", ".join(map(str, shape))
    return parsed(f"(float[{sizes}] x) => (float[{sizes}] y) {{ y = Relu (x) }}")


@pytest.fixture
def several(ship: Shipper) -> Any:
    """An app with the model ``det`` in three shapes on ``fixed``, and open on ``open`` and the source."""
    fixed: dict[str, Table] = {}
    opened: list[int | str] = [1, 3, "height", "width"]
    save(identity(opened), ship.folder / "det/open/det.onnx")
    save(identity(opened), ship.folder / "det/source/det.onnx")
    for name, shape in SHAPES.items():
        inputs = [{"name": "x", "shape": shape, "dtype": "float32"}]
        save(identity(shape), ship.folder / name / "fixed/m.onnx")
        variants = {"fixed": variant(f"{name}/fixed", "m.onnx", inputs=inputs)}
        if not fixed:
            inputs = [{"name": "x", "shape": opened, "dtype": "float32"}]
            variants["open"] = variant("det/open", "det.onnx", inputs=inputs)
        variants["source"] = source_of("det/source", "det.onnx", opened)
        fixed[name] = component(variants, "det")
    return ship.write(fixed)


def x_of(height: int, width: int) -> dict[str, tuple[int, ...]]:
    return {"x": (1, 3, height, width)}


def test_without_shapes_the_first_listed_is_opened(several: Any) -> None:
    assert several.models() == ["det"]
    assert several.shapes_of(several.load("det")) == {"x": (1, 3, 64, 64)}
    assert several.shapes_of(several.load("det", target="source")) == {
        "x": (1, 3, "height", "width")
    }


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1, 1, (32, 32)),
        (32, 32, (32, 32)),
        (32, 33, (32, 96)),
        (32, 96, (32, 96)),
        (33, 32, (64, 64)),
        (64, 64, (64, 64)),
        (0, 0, (32, 32)),
    ],
)
def test_the_smallest_shape_that_is_large_enough_is_opened(
    several: Any, height: int, width: int, expected: tuple[int, int]
) -> None:
    session = several.load("det", shapes=x_of(height, width))
    assert several.target_of(session) == "fixed"
    assert several.shapes_of(session) == {"x": (1, 3, *expected)}


LISTED = ("[1, 3, 64, 64]", "[1, 3, 32, 32]", "[1, 3, 32, 96]")


def test_where_no_shape_is_large_enough_a_target_with_open_shapes_is_opened(several: Any) -> None:
    session = several.load("det", shapes=x_of(64, 65))
    assert several.target_of(session) == "open"
    assert session.run(None, {"x": np.ones((1, 3, 64, 65), np.float32)})[0].shape[2:] == (64, 65)
    fixed, opened, source = several.explain("det", shapes=x_of(64, 65))
    assert fixed.outcome == "skipped"
    assert all(each in fixed.reason for each in LISTED)
    assert (opened.outcome, source.outcome) == ("opened", "not tried")


def test_an_unknown_rank_takes_every_shape(ship: Shipper) -> None:
    save(of_any_rank(), ship.folder / "a/cpu/a.onnx")
    inputs = [{"name": "x", "shape": None, "dtype": "float32"}]
    app = ship.write({"a": component({"cpu": variant("a/cpu", "a.onnx", inputs=inputs)})})
    for shape in ((), (2,), (1, 3, 4)):
        assert app.target_of(app.load("a", shapes={"x": shape})) == "cpu"


def test_where_nothing_is_large_enough_the_error_lists_the_shapes(several: Any) -> None:
    for arguments in ({"target": "fixed"}, {"target": "fixed", "fallback": None}):
        with pytest.raises(several.LoadError) as raised:
            several.load("det", shapes=x_of(65, 65), **arguments)
        assert all(each in str(raised.value) for each in LISTED)
    with pytest.raises(several.LoadError, match="none of its shapes is large enough"):
        # The number of channels is not open.
        several.load("det", shapes={"x": (1, 4, 1, 1)})


def test_sizes_of_numpy_are_sizes(several: Any) -> None:
    image: npt.NDArray[np.uint8] = np.zeros((1, 3, 20, 90), np.uint8)
    for shape in (image.shape, np.array(image.shape), [np.int32(size) for size in image.shape]):
        session = several.load("det", shapes={"x": shape})
        assert several.shapes_of(session) == {"x": (1, 3, 32, 96)}


def test_a_wrong_input_or_rank_is_an_error(several: Any) -> None:
    for shapes in ({"X": (1, 3, 1, 1)}, {"x": (3, 1, 1)}):
        with pytest.raises(several.LoadError, match=r"has the inputs \{'x': "):
            several.load("det", shapes=shapes)


def test_a_model_of_two_inputs_is_large_enough_in_both(ship: Shipper) -> None:
    components = {}
    for name, (first, second) in {"m.1": (8, 4), "m.2": (4, 8), "m.3": (4, 4)}.items():
        made = parsed(f"""(float[{first}] x, float[{second}] y) => (float[?] z)
        {{ z = Concat <axis = 0> (x, y) }}""")
        save(made, ship.folder / name / "m.onnx")
        inputs = [{"name": "x", "shape": [first]}, {"name": "y", "shape": [second]}]
        cpu = variant(name, "m.onnx", inputs=inputs)
        components[name] = component({"cpu": cpu}, "m")
    app = ship.write(components)
    for shapes, expected in (
        ({"x": (1,), "y": (1,)}, (4, 4)),
        ({"x": (5,)}, (8, 4)),
        ({"y": (5,), "x": (1,)}, (4, 8)),
        ({}, (8, 4)),
    ):
        found = app.shapes_of(app.load("m", shapes=shapes))
        assert found == {"x": (expected[0],), "y": (expected[1],)}
    with pytest.raises(app.LoadError, match="none of its shapes is large enough"):
        app.load("m", shapes={"x": (5,), "y": (5,)})


# --- The user's cache folder


def test_the_users_cache_folder_is_that_of_the_system(
    ship: Shipper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ship(cpu=CPU)
    name = app.__name__.split(".")[0]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for platform, variable, default in (
        ("linux", "XDG_CACHE_HOME", ".cache"),
        ("win32", "LOCALAPPDATA", "AppData/Local"),
        ("darwin", "XDG_CACHE_HOME", "Library/Caches"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setenv(variable, str(tmp_path / "caches"))
        app.user_folder.cache_clear()
        assert app.user_folder() == tmp_path / "caches" / name
        monkeypatch.delenv(variable)
        app.user_folder.cache_clear()
        assert app.user_folder() == tmp_path / default / name
        assert app.user_folder().is_dir()


@pytest.mark.parametrize("kind", ["no home", "a file"])
def test_without_a_cache_folder_a_temporary_one_is_used(
    ship: Shipper, tmp_path: Path, kind: str
) -> None:
    ship(cpu=changed(CPU, load_options={"cache": "{user-cache}/kernels"}))
    env = {"TMPDIR": str(tmp_path / "temp"), "TMP": str(tmp_path / "temp")}
    (tmp_path / "temp").mkdir()
    script = WITHOUT_CACHE
    if kind == "no home":
        env |= {"XDG_CACHE_HOME": "", "LOCALAPPDATA": ""}
        script = f"{NO_HOME}{WITHOUT_CACHE}"
    else:
        (tmp_path / "home").write_text("a file", encoding="utf-8")
    assert ship.script(script, env=env) == ["cpu", True]
    assert not list((tmp_path / "temp").glob("epcontext-*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_temporary_folder(ship: Shipper, tmp_path: Path) -> None:
    ship(cpu=CPU)
    (tmp_path / "home").write_text("a file", encoding="utf-8")
    script = """
import json, os, sys
import shipped
folder = shipped.user_folder()
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
print(json.dumps(folder.is_dir()))
"""
    assert ship.script(script) is True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_during_a_load_can_load(ship: Shipper) -> None:
    ship(npu=changed(NPU, plugin=plugin_of("slow_ep")), other=NPU)
    (ship.root / "slow_ep.py").write_text(SLOW_EP, encoding="utf-8")
    script = """
import json, os, signal, threading, warnings
import shipped, slow_ep
warnings.simplefilter("ignore", DeprecationWarning)
thread = threading.Thread(target=shipped.load, args=["a"])
thread.start()
slow_ep.entered.wait()
if (child := os.fork()) == 0:
    signal.alarm(30)
    shipped.explain("a", target="other")
    os._exit(0)
status = os.waitpid(child, 0)[1]
slow_ep.leave.set()
thread.join()
print(json.dumps(status))
"""
    assert ship.script(script) == 0


SLOW_EP = """
import threading
entered, leave = threading.Event(), threading.Event()
def get_library_path():
    entered.set()
    leave.wait()
    return "none"
"""


NO_HOME = """
import pathlib
def expanduser(path):
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.expanduser = expanduser
"""

WITHOUT_CACHE = """
import json, tempfile
import shipped
session, folder = shipped.load("a"), shipped.user_folder()
found = folder.is_relative_to(tempfile.gettempdir()) and (folder / "kernels").is_dir()
print(json.dumps([shipped.target_of(session), found]))
"""

"""ONNX Runtime itself opens the folder in the wheel, as it does for an app in C, C++ or C#.

Each step is a process of its own in the app's environment, so that a crash of an EP is a failure and no
more, and so that the ONNX Runtime behind ``ctypes`` and the one inside Python never meet.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import needs_qnn
from tests.integration import model_package_api
from tests.integration.conftest import Environment, copy_example, make_environment, run

pytestmark = [needs_qnn, pytest.mark.network]

CPU, QNN = "CPUExecutionProvider", "QNNExecutionProvider"
# QNN needs it to start, and ONNX Runtime starts the EP when it selects a variant.
OPTIONS: dict[str, dict[str, str]] = {CPU: {}, QNN: {"backend_type": "htp"}}

PROBE = """
import model_package_api as api
try:
    with api.runtime():
        print("available")
except api.UnavailableError as error:
    print(error)
"""

LIST = """
import json, sys
from pathlib import Path
import model_package_api as api
folder, answer = map(Path, sys.argv[1:])
with api.runtime() as ort, ort.package(folder) as package:
    eps = {c: [(v, package.ep(c, v)) for v in package.variants(c)] for c in package.components}
    answer.write_text(json.dumps([package.schema_version, eps]), encoding="utf-8")
"""

SELECT = """
import json, sys
from contextlib import ExitStack
from pathlib import Path
import numpy as np
import model_package_api as api
folder, ep, options, images, answer = sys.argv[1:]
with ExitStack() as stack:
    ort = stack.enter_context(api.runtime())
    if ep == "QNNExecutionProvider":
        import onnxruntime_qnn
        stack.enter_context(ort.registered(ep, Path(onnxruntime_qnn.get_library_path())))
    package = stack.enter_context(ort.package(Path(folder)))
    try:
        component = stack.enter_context(package.select("digits", ep, json.loads(options)))
    except api.OrtError as error:
        np.savez(answer, error=str(error))
        sys.exit()
    session = stack.enter_context(component.session())
    np.savez(
        answer, variant=component.variant, folder=str(component.folder),
        names=[*session.inputs, *session.outputs],
        logits=[session.run({"image": image[None]})[0] for image in np.load(images)],
    )
"""

REFERENCE = """
import json, sys
import numpy as np
import onnxruntime
model, ep, options, images, answer = sys.argv[1:]
if ep == "QNNExecutionProvider":
    import onnxruntime_qnn
    onnxruntime.register_execution_provider_library(ep, onnxruntime_qnn.get_library_path())
devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == ep]
session_options = onnxruntime.SessionOptions()
session_options.add_provider_for_devices(devices, json.loads(options))
session = onnxruntime.InferenceSession(model, session_options)
session.disable_fallback()
np.savez(answer, logits=[session.run(None, {"image": i[None]})[0] for i in np.load(images)])
"""


@dataclass(frozen=True)
class App:
    """The installed example app: its environment, the folder of its model package, and some images."""

    environment: Environment
    package: Path
    images: Path

    def run(self, script: str, *arguments: str | Path) -> str:
        """The output of ``script``, which can import the wrapper of the C API."""
        path = self.environment.folder / "script.py"
        path.write_text(script, encoding="utf-8")
        return self.environment.python(path, *arguments)

    def answer(self, script: str, subject: Path, ep: str) -> dict[str, Any]:
        """The arrays that ``script`` saves about a package or a model."""
        path = self.environment.folder / "answer.npz"
        path.unlink(missing_ok=True)
        self.run(script, subject, ep, json.dumps(OPTIONS[ep]), self.images, path)
        with np.load(path) as arrays:
            return dict(arrays)


@pytest.fixture(scope="module")
def app(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> App:
    """The example's wheel and the EP's package in a fresh environment with ONNX Runtime."""
    folder = tmp_path_factory.mktemp("model-package")
    project = copy_example(folder / "digits-app")
    # The example ships no source model, because its target "cpu" runs everywhere.
    with (project / "pyproject.toml").open("a", encoding="utf-8") as text:
        text.write('fallback = "source"\n')
    command = (sys.executable, "-m", "build", "-n", "-w", "-o", folder / "dist", project)
    run(*command, cwd=project, env=env)
    (wheel,) = (folder / "dist").glob("*.whl")
    environment = make_environment(folder / "venv", env)
    # With 1.32.0, ONNX Runtime's C API crashes with SIGSEGV when it opens a variant for QNN 2.7.0.
    environment.install(wheel, "onnxruntime-qnn", "onnxruntime<1.32")
    shutil.copy(model_package_api.__file__, environment.folder)
    (package,) = environment.folder.rglob("digits_app/epcontext")
    images = folder / "images.npy"
    np.save(images, np.random.default_rng(7).random((8, 1, 8, 8), np.float32))
    installed = App(environment, package, images)
    *_, reason = installed.run(PROBE).splitlines()
    if reason != "available":
        pytest.skip(reason)
    return installed


def manifest(package: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((package / "manifest.json").read_text(encoding="utf-8"))
    return content


def write(package: Path, content: Mapping[str, Any]) -> None:
    (package / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def variants(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["components"]["digits"]["variants"]
    return found


def check_opened(app: App, package: Path, ep: str, variant: str) -> None:
    """ONNX Runtime selects ``variant``, and its session gives what Python's does for the same file."""
    opened = app.answer(SELECT, package, ep)
    assert "error" not in opened, opened["error"]
    assert opened["variant"] == variant
    listed = variants(manifest(package))[variant]
    assert Path(str(opened["folder"])) == package / listed["variant_directory"]
    assert opened["names"].tolist() == ["image", "logits"]
    model = package / listed["variant_directory"] / listed["executor_info"]["ort"]["model_file"]
    expected = app.answer(REFERENCE, model, ep)["logits"]
    assert expected.shape == (8, 1, 10)
    assert len({logits.tobytes() for logits in expected}) == 8
    np.testing.assert_array_equal(opened["logits"], expected)


def test_it_lists_the_models_and_their_variants_in_the_configured_order(
    app: App, tmp_path: Path
) -> None:
    app.run(LIST, app.package, tmp_path / "listed.json")
    schema_version, components = json.loads((tmp_path / "listed.json").read_text(encoding="utf-8"))
    assert schema_version == 1
    assert components == {"digits": [["x-elite", QNN], ["cpu", CPU], ["source", CPU]]}


def test_the_cpu_gets_the_first_variant_for_it(app: App) -> None:
    check_opened(app, app.package, CPU, "cpu")


def test_a_variant_for_an_npu_is_not_selected_on_its_simulator(app: App) -> None:
    error = str(app.answer(SELECT, app.package, QNN)["error"])
    assert "No suitable model variant found for the configured execution providers" in error


def test_the_compiled_variant_opens_on_the_simulator(app: App, tmp_path: Path) -> None:
    # The simulator is a CPU to ONNX Runtime, so that only a variant without a device fits it.
    package = Path(shutil.copytree(app.package, tmp_path / "package"))
    content = manifest(package)
    del variants(content)["x-elite"]["device"]
    write(package, content)
    check_opened(app, package, QNN, "x-elite")


def test_the_source_model_is_a_variant_like_any_other(app: App, tmp_path: Path) -> None:
    package = Path(shutil.copytree(app.package, tmp_path / "package"))
    content = manifest(package)
    del variants(content)["cpu"]
    write(package, content)
    check_opened(app, package, CPU, "source")

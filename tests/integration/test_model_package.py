"""ONNX Runtime itself opens the folder in the wheel, as it does for an app in C, C++ or C#.

Each part is a process of its own in the app's environment, so that a crash of an EP is a failure and no
more, and so that the ONNX Runtime behind ``ctypes`` and the one inside Python never meet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, needs_qnn
from tests.integration import open_package
from tests.integration.conftest import Environment, copy_example, make_environment, run

pytestmark = [needs_qnn, pytest.mark.network]

CPU, QNN = "CPUExecutionProvider", "QNNExecutionProvider"
# QNN needs it to start, and ONNX Runtime starts the EP when it selects a variant.
OPTIONS: dict[str, dict[str, str]] = {CPU: {}, QNN: {"backend_type": "htp"}}


@dataclass(frozen=True)
class App:
    """The installed example app: its environment, and the folder of its model package."""

    environment: Environment
    package: Path

    def open(self, package: Path, ep: str) -> dict[str, Any]:
        """What `open_package` answers."""
        answer = self.environment.folder / "answer.json"
        self.environment.python(
            open_package.__file__, package, "digits", ep, json.dumps(OPTIONS[ep]), answer
        )
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        if "unavailable" in result:
            pytest.skip(result["unavailable"])
        return result


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
    (package,) = environment.folder.rglob("digits_app/epcontext")
    return App(environment, package)


def manifest(package: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((package / "manifest.json").read_text(encoding="utf-8"))
    return content


def write(package: Path, content: Mapping[str, Any]) -> None:
    (package / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def variants(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["components"]["digits"]["variants"]
    return found


def check_opened(app: App, package: Path, ep: str, variant: str) -> None:
    """ONNX Runtime selects ``variant``, and opens a session of it."""
    directory = variants(manifest(package))[variant]["variant_directory"]
    assert app.open(package, ep)["opened"] == [variant, str(package / directory)]


def test_the_cpu_gets_the_first_variant_for_it(app: App) -> None:
    check_opened(app, app.package, CPU, "cpu")


def test_a_variant_for_an_npu_is_not_selected_on_its_simulator(app: App) -> None:
    error = app.open(app.package, QNN)["error"]
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


def test_the_program_in_cpp_opens_the_package(app: App, tmp_path: Path) -> None:
    """The page's example, where a compiler finds ONNX Runtime's headers, such as by CPATH."""
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    text = (REPOSITORY / "docs" / "examples" / "model_package.cpp").read_text(encoding="utf-8")
    # The EP's library is elsewhere, and the CPU needs none.
    text = re.sub(r"  env\.RegisterExecutionProviderLibrary\(.*?\);\n", "", text, flags=re.DOTALL)
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text("#include <onnxruntime_cxx_api.h>\n", encoding="utf-8")
    command = [compiler, "-std=c++17", str(source)]
    if subprocess.run([*command, "-fsyntax-only"], capture_output=True, check=False).returncode:
        pytest.skip("the compiler finds no headers of ONNX Runtime")
    source.write_text(text, encoding="utf-8")
    site = app.package.parents[1]
    (library,) = (site / "onnxruntime" / "capi").glob("libonnxruntime.so*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(library)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    run(*command, "-L", tmp_path, "-lonnxruntime", "-o", program, cwd=tmp_path, env=env)
    *_, number = run(program, cwd=site, env=env).splitlines()
    script = (
        "import numpy as np; from digits_app.epcontext import load; "
        "image = np.zeros((1, 1, 8, 8), np.float32); "
        "print(load('digits', target='cpu').run(None, {'image': image})[0][0, 0])"
    )
    assert float(number) == pytest.approx(float(app.environment.python("-c", script)), abs=1e-4)

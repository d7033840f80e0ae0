"""The main job from end to end: the example project, and its app."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import REPOSITORY, needs_qnn
from tests.integration.conftest import (
    UV,
    Environment,
    copy_example,
    make_environment,
    run,
)

pytestmark = [needs_qnn, pytest.mark.network]

WHEEL = "digits_app-1.0.0-py3-none-any.whl"
SHIPPED = {
    "__init__.py",
    "_check.py",
    "_runner.py",
    "_user_cache.py",
    "manifest.json",
    "digits/cpu/digits_optimized.onnx",
    "digits/x-elite/digits_ctx.onnx",
    "digits/x-elite/digits_ctx_qnn.bin",
}

Env = dict[str, str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, env: Env) -> Path:
    """The wheel of the example, built by ``python -m build`` from its sdist."""
    folder = tmp_path_factory.mktemp("example")
    project = copy_example(folder / "digits-app")
    command = ("-m", "build", UV, "-o", folder / "dist", project)
    text = run(sys.executable, *command, cwd=project, env=env)
    assert "digits -> x-elite (qnn): ok, 10/10 nodes, agrees on " in text
    assert "digits -> cpu (cpu): ok, optimized graph, agrees on " in text
    return folder / "dist" / WHEEL


@pytest.fixture(scope="module")
def app(built: Path, env: Env, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment with the app and the EP's package."""
    installed = make_environment(tmp_path_factory.mktemp("app") / "venv", env)
    installed.install(built, "onnxruntime-qnn")
    return installed


@pytest.fixture(scope="module")
def plain_app(built: Path, env: Env, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment with only the app, as on a machine without an NPU."""
    installed = make_environment(tmp_path_factory.mktemp("plain") / "venv", env)
    installed.install(built)
    return installed


def test_the_wheel_has_the_artifacts_and_the_sdist_the_model(built: Path) -> None:
    folder = "digits_app/epcontext/"
    with zipfile.ZipFile(built) as archive:
        names = {n.removeprefix(folder) for n in archive.namelist() if n.startswith(folder)}
        manifest = json.loads(archive.read(f"{folder}manifest.json"))
    assert names == SHIPPED
    variants = manifest["components"]["digits"]["variants"]
    assert list(variants) == ["x-elite", "cpu"]
    npu, cpu = variants.values()
    assert (npu["ep"], npu["device"]) == ("QNNExecutionProvider", "npu")
    assert npu["compatibility_string"].split(":")[4:6] == ["73", "60"]
    assert npu["executor_info"]["ort"]["provider_options"]["htp_performance_mode"] == "burst"
    assert (cpu["ep"], "device" in cpu) == ("CPUExecutionProvider", False)
    npu, cpu = (each["additional_metadata"]["hatch-epcontext"] for each in variants.values())
    assert npu["product"] == "context"
    assert (npu["settings"]["ep"], npu["settings"]["device"]) == ("QNNExecutionProvider", "npu")
    coverage = npu["coverage"]
    assert (coverage["nodes"], coverage["compiled"], coverage["partitions"]) == (10, 10, 1)
    assert coverage["uncovered"] == []
    assert npu["validation"]["status"] == "ran"
    assert cpu["product"] == "optimized"
    assert cpu["coverage"] is None
    assert (built.parent / "digits_app-1.0.0.tar.gz").is_file()


def test_without_isolation_the_same_wheel_is_built_from_the_cache(
    built: Path, example: Path, env: Env, tmp_path: Path
) -> None:
    command = ("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    assert run(sys.executable, *command, cwd=example, env=env).count("from the cache") == 2
    assert (tmp_path / WHEEL).read_bytes() == built.read_bytes()
    assert not (example / "digits_app" / "epcontext").exists()


def test_the_compiled_context_reads_digits(app: Environment, tmp_path: Path) -> None:
    # Importing it takes a second, which all processes that collect tests would spend.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = (data.images / 16).astype(np.float32)[:, None]
    # The quarter that training/train.py holds out.
    _, images, _, labels = train_test_split(
        images, data.target, test_size=0.25, random_state=7, stratify=data.target
    )
    np.savez(tmp_path / "held_out.npz", images=images)
    script = tmp_path / "read_digits.py"
    script.write_text(
        "import sys\n"
        "import numpy as np\n"
        "import onnxruntime\n"
        "from digits_app.epcontext import load, target_of\n"
        "def outputs(session):\n"
        "    images = np.load(sys.argv[1])['images']\n"
        "    return np.concatenate([session.run(None, {'image': i[None]})[0] for i in images])\n"
        "compiled, cpu = load('digits', device='any'), load('digits', target='cpu')\n"
        "source = onnxruntime.InferenceSession(sys.argv[3])\n"
        "print(target_of(compiled), target_of(cpu), compiled.get_providers()[0])\n"
        "sessions = {'compiled': compiled, 'cpu': cpu, 'source': source}\n"
        "np.savez(sys.argv[2], **{name: outputs(each) for name, each in sessions.items()})\n",
        encoding="utf-8",
    )
    model = REPOSITORY / "example_project" / "models" / "digits.onnx"
    text = app.python(script, tmp_path / "held_out.npz", tmp_path / "outputs.npz", model)
    assert "x-elite cpu QNNExecutionProvider" in text
    outputs = np.load(tmp_path / "outputs.npz")
    compiled, source = outputs["compiled"], outputs["source"]
    np.testing.assert_allclose(outputs["cpu"], source, atol=1e-4)
    assert len(labels) == 450
    assert (compiled.argmax(1) == labels).mean() >= 0.97
    assert (compiled.argmax(1) == source.argmax(1)).all()
    # Close, but not equal: the NPU computes in float16.
    assert 0 < np.abs(compiled - source).max() < 0.05


def test_a_simulated_npu_does_not_count_as_an_npu(app: Environment) -> None:
    sample = REPOSITORY / "example_project" / "samples" / "7.png"
    command = app.executable("digits-app")
    text = run(command, sample, "--explain", cwd=app.folder, env=app.env)
    assert text.startswith("7 (")
    assert "on cpu)" in text.splitlines()[0]
    assert "x-elite: skipped, QNNExecutionProvider finds no npu, only cpu" in text
    text = run(command, sample, "--device", "any", cwd=app.folder, env=app.env)
    assert "on x-elite)" in text
    text = run(command, sample, "--device", "npu", cwd=app.folder, env=app.env, fails=True)
    assert "digits-app: the model 'digits' cannot be opened on this machine:" in text
    assert "Traceback" not in text


def test_without_the_eps_package_the_app_falls_back_and_explains_it(plain_app: Environment) -> None:
    sample = REPOSITORY / "example_project" / "samples" / "3.png"
    command = plain_app.executable("digits-app")
    text = run(command, sample, "--explain", cwd=plain_app.folder, env=plain_app.env)
    assert text.startswith("3 (")
    assert "x-elite: skipped, onnxruntime-qnn is not installed" in text
    assert "cpu: opened, CPUExecutionProvider on cpu" in text


def test_an_editable_install_opens_the_source_model(example: Path, fresh: Environment) -> None:
    fresh.install("-e", example)
    text = fresh.python("-c", "from digits_app.epcontext import *; print(*explain('digits'))")
    assert "source: opened, CPUExecutionProvider on cpu" in text

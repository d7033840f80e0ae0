"""Apps are run in processes of their own, as users run them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Cli
from tests.models import network, parsed, save
from tests.worker.test_states import lstm

TOML = """
[tool.epcontext]
targets.cpu.provider = "cpu"
targets.cpu.static-shapes = true
[[tool.epcontext.models]]
path = "models/image.onnx"
dims = { batch = 1 }
[[tool.epcontext.models]]
path = "models/speech.onnx"
"""

APP = """
import sys
import numpy as np
import onnxruntime as ort

image = ort.InferenceSession("models/image.onnx", providers=["CPUExecutionProvider"])
speech = ort.InferenceSession(open("models/speech.onnx", "rb").read())
name = image.get_inputs()[0].name
for index in range(30):
    image.run(None, {name: np.full((1, 1, 8, 8), 2.0**index, np.float32)})
image.run(None, {name: np.zeros((3, 1, 8, 8), np.float32)})
rng = np.random.default_rng(0)
for stream in range(2):
    h = c = np.zeros((1, 1, 4), np.float32)
    for frame in range(5):
        x = rng.standard_normal((2, 1, 3)).astype(np.float32)
        c, h = speech.run(None, {"x": x, "h0": h, "c0": c})
print("the app has run", *sys.argv[1:])
sys.exit(3)
"""


@pytest.fixture
def app_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (project / "pyproject.toml").write_text(TOML, encoding="utf-8")
    save(network(), project / "models" / "image.onnx")
    save(lstm(), project / "models" / "speech.onnx")
    (project / "app.py").write_text(APP, encoding="utf-8")
    monkeypatch.chdir(project)
    return project


def arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def test_the_samples_of_an_app_are_kept_and_validate_its_models(
    cli: Cli, app_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = cli("record", "--", sys.executable, "app.py", "-m", "x", code=3).stderr
    assert capfd.readouterr().out == "the app has run -m x\n"
    samples = app_project / ".epcontext-samples"
    images = {arrays(file)["x"].max() for file in (samples / "image").glob("*.npz")}
    assert len(images) == 8
    # The first one, and others of the whole range.
    assert 1.0 in images
    assert max(images) > 2.0**15
    files = {file.stem.partition("-")[2]: file for file in (samples / "speech").glob("*.npz")}
    assert set(files) == {f"{sample}-{frame}" for sample in (0, 1) for frame in range(1, 6)}
    assert not arrays(files["1-1"])["h0"].any()
    assert arrays(files["1-2"])["h0"].any()
    assert "image: kept 8 samples" in printed
    assert "speech: kept 2 samples" in printed
    (line,) = [each for each in printed.splitlines() if '.epcontext-samples/speech"' in each]
    (image,) = [each for each in printed.splitlines() if '.epcontext-samples/image"' in each]
    assert 'states = { h0 = "h1", c0 = "c1" }' in line
    toml = TOML.replace("dims = { batch = 1 }\n", f"dims = {{ batch = 1 }}\n{image}\n")
    (app_project / "pyproject.toml").write_text(toml + line, encoding="utf-8")
    built = cli("build").stderr
    assert built.count("agrees on ") == built.count(" given inputs") == 2


@pytest.mark.parametrize(
    ("flags", "shown"), [((), "batch"), (("--compiled-shapes",), 1)], ids=["as-it-is", "compiled"]
)
def test_a_larger_batch_is_several_samples_of_the_compiled_size(
    cli: Cli,
    app_project: Path,
    capfd: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    shown: Any,
) -> None:
    code = (
        "import numpy as np, onnxruntime as o; s = o.InferenceSession('models/image.onnx'); "
        "print([v.shape for v in (*s.get_inputs(), *s.get_outputs())]); "
        "s.run(None, {'x': np.arange(192, dtype=np.float32).reshape(3, 1, 8, 8)})"
    )
    printed = cli("record", *flags, "--", sys.executable, "-c", code).stderr
    assert capfd.readouterr().out == f"{[[shown, 1, 8, 8], [shown, 10]]}\n"
    assert "image: kept 3 samples" in printed
    files = (app_project / ".epcontext-samples" / "image").glob("*.npz")
    samples = [arrays(file)["x"] for file in files]
    assert {sample.shape for sample in samples} == {(1, 1, 8, 8)}
    assert {sample.min() for sample in samples} == {0, 64, 128}


def test_the_sizes_of_the_app_are_printed_and_compared_with_the_table(
    cli: Cli, app_project: Path
) -> None:
    text = (
        "(float[batch, length] x, float[n] b, float[?] u) => (float[batch, length] y) {y = Neg(x)}"
    )
    save(parsed(text), app_project / "models" / "image.onnx")
    toml = TOML.replace(
        "dims = { batch = 1 }", "dims = { batch = 1, length = 64 }\nshapes = { u = [3] }"
    )
    (app_project / "pyproject.toml").write_text(toml, encoding="utf-8")
    code = (
        "import numpy as np, onnxruntime as o; s = o.InferenceSession('models/image.onnx')\n"
        "for n in (77, 77, 64, 77): s.run(None, {'x': np.ones((1, n), np.float32), "
        "'b': np.ones(5, np.float32), 'u': np.ones(3, np.float32)})"
    )
    printed = cli("record", "--", sys.executable, "-c", code).stderr
    _, dims, shapes, rest, validate, warning, *_ = printed.splitlines()
    assert dims == "    dims = { batch = 1, length = 77, n = 5 }"
    assert shapes == "    shapes = { u = [3] }"
    assert rest == "    # in 3 of 4 runs; else batch = 1, length = 64, n = 5, u = [3]"
    assert "image: 3 of 4 runs had other sizes than the table" in warning
    samples = app_project / ".epcontext-samples"
    assert len([*(samples / "image").glob("*.npz")]) == 3
    assert len([*(samples / "image-other-sizes").glob("*.npz")]) == 1
    sizes = "dims = { batch = 1, length = 64 }\nshapes = { u = [3] }"
    toml = toml.replace(sizes, "\n".join((dims, shapes, validate)))
    (app_project / "pyproject.toml").write_text(toml, encoding="utf-8")
    assert "image -> cpu (cpu): compiled" in cli("build").stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_only_this_user_may_read_samples_and_git_ignores_them(cli: Cli, app_project: Path) -> None:
    cli("record", "--", sys.executable, "app.py", code=3)
    samples = app_project / ".epcontext-samples"
    assert samples.stat().st_mode & 0o777 == 0o700
    subprocess.run(["git", "init", "-q", app_project], check=True)
    status = ["git", "-C", str(app_project), "status", "--short", "-uall"]
    assert ".epcontext-samples" not in subprocess.check_output(status, text=True)


def test_the_loaders_models_run_on_the_cpu_and_are_recorded(cli: Cli, app_project: Path) -> None:
    cli("export", ".", "-o", "app_models")
    code = (
        "from app_models import load, target_of; import numpy as np; s = load('image'); "
        "s.run(None, {'x': np.ones((1, 1, 8, 8), np.float32)}); print(target_of(s))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "cpu\n"
    printed = cli("record", "--", sys.executable, "-c", code).stderr
    assert "image: kept 1 sample" in printed


@pytest.mark.parametrize(
    "command",
    [
        ("-c", "pass"),
        ("-I", "-c", "pass"),
        ("-c", "import onnxruntime as o; o.InferenceSession('other.onnx')"),
        ("-c", "import onnxruntime as o; o.InferenceSession('models/image.onnx')"),
    ],
)
def test_a_model_of_which_nothing_was_recorded_is_named(
    cli: Cli, app_project: Path, command: tuple[str, ...]
) -> None:
    save(network(2), app_project / "other.onnx")
    printed = cli("record", "--", sys.executable, *command)
    assert "image: the app did not call run()" in printed.stderr
    assert not (app_project / ".epcontext-samples").exists()


def test_wrong_usage(cli: Cli, app_project: Path) -> None:
    assert "there is no program 'no-such-app'" in cli("record", "no-such-app", code=2).stderr
    assert "Missing argument" in cli("record", "--", code=2).stderr
    (app_project / ".epcontext-samples").mkdir()
    printed = cli("record", "--", sys.executable, "app.py", code=2).stderr
    assert ".epcontext-samples exists" in printed


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_ctrl_c_keeps_what_was_recorded(app_project: Path) -> None:
    waiting = APP.replace("sys.exit(3)", "import time\ntime.sleep(600)")
    (app_project / "app.py").write_text(waiting, encoding="utf-8")
    # A shell lets what it runs in the background ignore it.
    main = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from hatch_epcontext.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", main, "record", "--", sys.executable, "-u", "app.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "the app has run\n"
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert "image: kept 8 samples" in errors
    assert process.returncode == 130
    assert "Aborted" not in errors


STARTED = """
import sys, subprocess, numpy as np, onnxruntime as o
s = o.InferenceSession('models/image.onnx')
s.run(None, {'x': np.full((1, 1, 8, 8), len(sys.argv), np.float32)})
len(sys.argv) > 1 or subprocess.check_call([sys.executable, __file__, 'again'])
"""

# Imported before, ONNX Runtime has threads that a child lacks: sometimes it waits for them for ever.
FORKED = """
import os
child = os.fork()
import numpy as np, onnxruntime as o
s = o.InferenceSession('models/image.onnx')
s.run(None, {'x': np.full((1, 1, 8, 8), 1 + bool(child), np.float32)})
child and os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    "code",
    [STARTED, pytest.param(FORKED, marks=pytest.mark.skipif("not hasattr(os, 'fork')"))],
)
def test_each_process_of_an_app_is_recorded(cli: Cli, app_project: Path, code: str) -> None:
    (app_project / "app.py").write_text(code, encoding="utf-8")
    printed = cli("record", "--", sys.executable, "app.py").stderr
    assert "image: kept 2 samples" in printed
    files = sorted((app_project / ".epcontext-samples" / "image").glob("*.npz"))
    assert {arrays(file)["x"].max() for file in files} == {1, 2}


def test_an_app_runs_on_where_nothing_can_be_recorded(
    cli: Cli, app_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = "os.path.join(os.environ['PYTHONPATH'].split(os.pathsep)[0], 'image')"
    (app_project / "app.py").write_text(f"import os; os.rmdir({folder})\n" + APP, encoding="utf-8")
    printed = cli("record", "--", sys.executable, "app.py", code=3).stderr
    assert "epcontext record: FileNotFoundError" in capfd.readouterr().err
    assert "speech: kept 2 samples" in printed


def test_the_environments_own_sitecustomize_still_counts(
    cli: Cli, app_project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (app_project / "own").mkdir()
    (app_project / "own" / "sitecustomize.py").write_text("print('own')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(app_project / "own"))
    cli("record", "--", sys.executable, "app.py", code=3)
    assert capfd.readouterr().out.splitlines()[0] == "own"
    assert list(app_project.glob(".epcontext-samples/image/*.npz"))
    shutil.rmtree(app_project / "own")

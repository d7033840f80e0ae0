from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from hatch_epcontext import loader
from tests.cli.conftest import Cli, build_wheel, problems
from tests.conftest import needs, needs_qnn
from tests.models import network, save

pytestmark = pytest.mark.one_cache


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def open_by_onnx_runtime(package: Path) -> None:
    """ONNX Runtime's own Python reads all of it, selects a variant for the CPU, and runs it."""
    context = onnxruntime.ModelPackageContext(str(package))
    assert context.get_component_names() == ["a", "b"]
    assert context.get_variant_names("a") == ["one", "two"]
    options = onnxruntime.ModelPackageOptions(onnxruntime.SessionOptions())
    component = context.select_component("a", options)
    assert component.get_selected_variant_name() == "one"
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float32)}
    (outputs,) = component.create_session().run(None, feeds)
    file = package / "a" / "one" / "a_optimized.onnx"
    expected = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(outputs, expected.run(None, feeds)[0], atol=1e-6)
    opened = onnxruntime.ModelPackage.open(str(package))
    info = opened.get_info()
    assert (info["schema_version_major"], info["layout"]) == (1, "portable")
    manifest = json.loads((package / "manifest.json").read_bytes())
    read = {name: json.loads(opened.get_component_json(name)) for name in ("a", "b")}
    assert {name: body["variants"].keys() for name, body in read.items()} == {
        name: body["variants"].keys() for name, body in manifest["components"].items()
    }
    opened.close()


def test_the_folder_is_that_of_a_wheel_and_its_loader_opens_it(
    cli: Cli, app_project: Path, tmp_path: Path
) -> None:
    out = app_project / "my_app" / "epcontext"
    printed = cli("export", app_project, "-o", out)
    assert printed.stderr.count("ok, optimized graph, agrees on synthetic inputs") == 4
    assert printed.stdout.startswith(f"wrote {out} (10 files, ")
    assert files(out) == [
        "__init__.py",
        "__pyinstaller/__init__.py",
        "__pyinstaller/hook-my_app.epcontext.py",
        "_check.py",
        "_runner.py",
        "_user_cache.py",
        "a/one/a_optimized.onnx",
        "a/two/a_optimized.onnx",
        "b/one/b_optimized.onnx",
        "b/two/b_optimized.onnx",
        "manifest.json",
    ]
    code = "from my_app.epcontext import load, target_of; print(target_of(load('a')))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=app_project, capture_output=True, text=True, check=True)
    assert done.stdout == "one\n"
    if hasattr(onnxruntime, "ModelPackageContext"):
        open_by_onnx_runtime(out)
    inspected = cli("inspect", out, "--verify").stdout
    assert inspected.endswith("verified: 10 files\n")
    # As the manifest records them.
    assert printed.stdout.partition("(")[2].rstrip(")\n") in inspected.splitlines()[0]


def test_it_is_the_same_as_in_a_wheel_byte_for_byte(
    cli: Cli, app_project: Path, tmp_path: Path
) -> None:
    with (app_project / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('[project.entry-points.pyinstaller40]\nhook-dirs = "my_app.hooks:folders"\n')
    wheel = build_wheel(app_project)
    out = app_project / "my_app" / "epcontext"
    cli("export", app_project, "-o", out)
    unpack = [sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "wheel")]
    subprocess.run(unpack, check=True)
    packed = tmp_path / "wheel" / "my_app" / "epcontext"
    assert files(out) == files(packed)
    for name in files(packed):
        assert (out / name).read_bytes() == (packed / name).read_bytes()


def test_only_the_chosen_target_is_exported(cli: Cli, app_project: Path, tmp_path: Path) -> None:
    arguments = (
        "export",
        app_project,
        "--target",
        "two",
        "-o",
        tmp_path / "out",
    )
    assert "-> one" not in cli(*arguments).stderr
    assert files(tmp_path / "out") == [
        "__init__.py",
        "_check.py",
        "_runner.py",
        "_user_cache.py",
        "a/two/a_optimized.onnx",
        "b/two/b_optimized.onnx",
        "manifest.json",
    ]
    assert "exists already" in cli(*arguments, code=1).stderr
    cli(*arguments, "--overwrite")


@needs_qnn
def test_contexts_are_exported_and_validated(cli: Cli, app_project: Path, tmp_path: Path) -> None:
    toml = """
[tool.epcontext]
targets.qnn.provider = "qnn"
targets.qnn.provider-options = { soc_model = 60 }
[[tool.epcontext.models]]
path = "models/a.onnx"
shapes = [{ x = [1, 1, 8, 8] }, { x = [2, 1, 8, 8] }]
"""
    (app_project / "pyproject.toml").write_text(toml, encoding="utf-8")
    save(network(), app_project / "models" / "a.onnx")
    out = tmp_path / "out"
    cli("export", app_project, "-o", out)
    printed = cli("inspect", out).stdout
    assert "a.1x1x8x8: a shape of a, x 1x1x8x8\na.2x1x8x8: a shape of a, x 2x1x8x8\n" in printed
    lines = cli("validate", out).stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"a.{n}x1x8x8 -> {target}" for n in (1, 2) for target in ("qnn", "source")
    ]
    assert all("agrees on synthetic inputs, simulator (" in line for line in lines[::2])


@needs("tensorrt_rtx_bindings")
def test_a_package_of_engines_is_validated_by_its_structure_without_a_gpu(
    cli: Cli, app_project: Path, tmp_path: Path
) -> None:
    file = app_project / "pyproject.toml"
    text = file.read_text(encoding="utf-8")
    for name in ("a", "b"):
        save(network(1), app_project / "models" / f"{name}.onnx")
    rtx = '"tensorrt-rtx"\nchip = "rtx-40"'
    file.write_text(text.replace('"cpu"\n[tool', f"{rtx}\n[tool"), encoding="utf-8")
    out = tmp_path / "out"
    cli("export", app_project, "-o", out, "--target", "one")
    printed = cli("validate", out, "--set", "validate=auto", "--json").stdout
    variant, *_ = json.loads(printed)["variants"]
    if variant["validation"]["status"] == "ran":
        pytest.skip("this machine has an RTX GPU")
    assert variant["validation"]["status"] == "structure"
    engine = out / "a" / "one" / "a_ctx.engine"
    whole = engine.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        engine.write_bytes(damaged)
        assert problems(cli("validate", out, "--set", "validate=structure", code=1))
    needs_other = 'dependencies = ["onnxruntime-ep-nv-tensorrt-rtx-cu13<0.5"]'
    file.write_text(f"[project]\n{needs_other}\n{file.read_text('utf-8')}", encoding="utf-8")
    refused = cli("export", app_project, "-o", tmp_path / "more", "--target", "one", code=2)
    assert [line.split()[-1] for line in problems(refused)] == ["EPC102"]


def test_equal_artifacts_of_two_targets_are_shipped_once_and_all_targets_open(
    cli: Cli, app_project: Path, tmp_path: Path
) -> None:
    toml = """
[tool.epcontext]
models = ["models/a.onnx"]
[tool.epcontext.targets]
any = { provider = "cpu" }
few = { provider = "cpu", session-options = { "session.intra_op_num_threads" = "1" } }
other = { provider = "cpu", optimization = "extended" }
"""
    (app_project / "pyproject.toml").write_text(toml, encoding="utf-8")
    cli("export", app_project, "-o", tmp_path / "out")
    shipped = [name for name in files(tmp_path / "out") if name.endswith(".onnx")]
    assert shipped == ["a/any/a_optimized.onnx", "a/other/a_optimized.onnx"]
    variants = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["components"]["a"][
        "variants"
    ]
    assert [v["variant_directory"] for v in variants.values()] == ["a/any", "a/any", "a/other"]
    for target in variants:
        opened = loader.load("a", target=target, package=tmp_path / "out", verify=True)
        assert loader.target_of(opened) == target
    assert "verified" in cli("inspect", tmp_path / "out", "--verify").stdout
    assert len(cli("validate", tmp_path / "out").stdout.splitlines()) == 3

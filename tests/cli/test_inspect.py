from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from hatch_epcontext.jobs.boards import BoardRun
from hatch_epcontext.package.bundle import bundle
from tests.cli.conftest import Cli, build_wheel, problems
from tests.conftest import needs_qnn
from tests.models import network, save, save_with_data
from tests.results import TOML, Artifact, compiled, configured, install, resulting
from tests.worker.actions.test_compile import X_ELITE, compile_context_of

pytestmark = pytest.mark.one_cache


@pytest.fixture
def wheel(app_project: Path) -> Path:
    """The wheel of a project with two models and two targets, which also ships the sources."""
    text = (app_project / "pyproject.toml").read_text("utf-8")
    text = text.replace("[tool.epcontext]", '[tool.epcontext]\nfallback = "source"')
    (app_project / "pyproject.toml").write_text(text, encoding="utf-8")
    return build_wheel(app_project)


def test_a_wheel_is_shown_and_verified(cli: Cli, wheel: Path) -> None:
    printed = cli("inspect", wheel, "--verify").stdout
    assert printed.startswith("my_app/epcontext: hatch-epcontext ")
    assert printed.count("CPUExecution") == 6
    assert printed.count("agrees on synthetic inputs") == printed.count(", cosine 1.00000") == 4
    rows = [line for line in printed.splitlines() if " source " in line]
    size = (wheel.parents[1] / "models" / "a.onnx").stat().st_size
    assert all(row.endswith(f"  {size / 1000:.1f} kB") for row in rows)
    assert len(rows) == 2
    checked = "verified: 10 files\n"
    assert printed.endswith(checked)


def test_a_file_that_models_share_is_counted_once(cli: Cli, tmp_path: Path) -> None:
    size = save(network(), tmp_path / "net.onnx").stat().st_size
    toml = """
        models = [{ path = "net.onnx", name = "a" }, { path = "net.onnx", name = "b" }]
        targets.npu = { provider = "qnn", chip = "snapdragon-x-elite" }
        fallback = "source"
    """
    result = compiled(configured(tmp_path, toml), tmp_path / "artifacts")
    bundled = bundle(result, tmp_path, {})
    rows = [line.split() for line in cli("inspect", bundled.folder).stdout.splitlines()]
    sizes = {row[0]: " ".join(row[3:]) for row in rows if "source" in row}
    assert sizes == {"a": f"{size / 1000:.1f} kB", "b": ""}


def test_a_table_for_a_readme_has_no_markup_of_others(
    cli: Cli, project: Path, tmp_path: Path
) -> None:
    result = compiled(configured(project, TOML), tmp_path / "compiled")
    chip = "*[Chip](http://x)* | <b>"
    run = BoardRun("agrees", chip, "1.2", "Linux", {}, latency=0.0021)
    bundled = bundle(replace(result, boards={("a", "cpu"): (run,)}), tmp_path, {})
    _, _, row = cli("inspect", bundled.folder, "--markdown").stdout.splitlines()
    assert row == (
        "| a | cpu | CPUExecutionProvider | optimized graph | ran, NOT compared | "
        r"agrees on \*\[Chip\](http://x)\* \| \<b\> (driver 1.2), 2.1 ms |"
    )
    assert (
        f"a for cpu: agrees on {chip} (driver 1.2), 2.1 ms" in cli("inspect", bundled.folder).stdout
    )
    both = cli("inspect", bundled.folder, "--markdown", "--json", code=2)
    assert "Choose --json or --markdown." in both.stderr


def test_a_wheel_as_json(cli: Cli, wheel: Path) -> None:
    result = cli("inspect", wheel, "--json", "--verify")
    assert result.stderr.startswith("verified: 10 files")
    found = json.loads(result.stdout)
    assert (found["path"], found["model"]) == (str(wheel), None)
    package = found["packages"]["my_app/epcontext"]
    with zipfile.ZipFile(wheel) as archive:
        manifest = json.loads(archive.read("my_app/epcontext/manifest.json"))
    # As the manifest has it.
    assert package.keys() == manifest.keys()
    assert package["additional_metadata"] == manifest["additional_metadata"]
    variants = package["components"]["a"]["variants"]
    # In the order of preference.
    assert list(variants) == ["one", "two", "source"]
    for name in ("executor_info", "additional_metadata"):
        assert variants["one"][name] == manifest["components"]["a"]["variants"]["one"][name]


def test_changed_and_missing_files_of_a_package_are_found(
    cli: Cli, wheel: Path, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    assert "verified: 10 files" in cli("inspect", installed, "--verify").stdout
    package = installed / "my_app" / "epcontext"
    assert "verified: 10 files" in cli("inspect", package, "--verify").stdout
    (package / "a" / "one" / "a_optimized.onnx").write_bytes(b"changed")
    (package / "b" / "source" / "b.onnx").unlink()
    cli("inspect", package)
    damaged = [package / "a" / "one" / "a_optimized.onnx", package / "b" / "source" / "b.onnx"]
    result = cli("inspect", package, "--verify", code=1)
    assert problems(result) == [f"{path}: EPC506" for path in damaged]


def test_a_damaged_wheel_is_found(cli: Cli, wheel: Path, tmp_path: Path) -> None:
    damaged = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, b"changed" if name.endswith("one/a_optimized.onnx") else content)
    cli("inspect", damaged)
    failed = cli("inspect", damaged, "--verify", "--json", code=1)
    assert json.loads(failed.stdout)["packages"]
    assert problems(failed) == [f"{wheel.name}: my_app/epcontext: EPC502"]
    assert "a/one/a_optimized.onnx differs" in failed.stderr
    missing = tmp_path / "missing.whl"
    assert problems(cli("inspect", missing, "--verify", code=1)) == [f"{missing}: EPC505"]


def test_a_source_model_is_shown(cli: Cli, tmp_path: Path) -> None:
    path = save_with_data(network(), tmp_path / "a.onnx")
    printed = cli("inspect", path, "--verify").stdout
    assert "input x: float32, batch x 1 x 8 x 8\n" in printed
    assert "output y: float32, batch x 10\n" in printed
    assert "operators: Conv 1, Flatten 1, MatMul 1, Relu 1\n" in printed
    assert "external data: network.data\n" in printed
    assert "verified: 1 file\n" in printed
    (tmp_path / "network.data").unlink()
    assert "external data: network.data\n" in cli("inspect", path).stdout
    result = cli("inspect", path, "--verify", code=1)
    assert [problem.rpartition(" ")[2] for problem in problems(result)] == ["EPC506"]
    assert "'network.data'" in result.stderr
    whole = save(network(), tmp_path / "whole.onnx")
    assert cli("inspect", whole, "--verify").stdout.endswith("verified: 0 files\n")


@needs_qnn
def test_a_context_model_is_shown(cli: Cli, tmp_path: Path) -> None:
    path = compile_context_of(network(1), tmp_path, X_ELITE)
    printed = cli("inspect", path, "--verify").stdout
    assert "compatibility with QNNExecutionProvider: v2:" in printed
    assert "a_ctx_qnn.bin" in printed
    assert "verified: 1 file\n" in printed
    (context,) = json.loads(cli("inspect", path, "--json").stdout)["model"]["contexts"]
    assert context["source"] == "QNNExecutionProvider"
    assert len(context["sha256"]) == 64
    assert context["size"] == (path.parent / "a_ctx_qnn.bin").stat().st_size
    (path.parent / "a_ctx_qnn.bin").unlink()
    assert "(missing)" in cli("inspect", path).stdout
    assert "the sidecar 'a_ctx_qnn.bin'" in cli("inspect", path, "--verify", code=1).stderr


def test_external_data_outside_of_the_folder_is_an_error(cli: Cli, tmp_path: Path) -> None:
    made = network()
    save_with_data(made, tmp_path / "a.onnx")
    loaded = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    for tensor in loaded.graph.initializer:
        tensor.external_data[0].value = "../secret"
    path = save(loaded, tmp_path / "b.onnx")
    assert "external data outside of its folder: ../secret" in cli("inspect", path).stdout
    result = cli("inspect", path, "--verify", code=1)
    assert [each.rpartition(" ")[2] for each in problems(result)] == ["EPC203"]


@pytest.mark.parametrize(
    ("name", "content", "id_", "words"),
    [
        *(
            ("a.onnx", each, "EPC201", "")
            for each in (b"", b"no model", b"version https://git-lfs")
        ),
        ("a.whl", b"PK", "EPC505", ""),
        ("my_app-1.tar.gz", b"\x1f\x8b", "EPC505", ""),
        ("none", None, "EPC505", ""),
        ("", None, "EPC505", ""),
    ],
)
def test_other_files_and_folders_are_errors(
    cli: Cli, tmp_path: Path, name: str, content: bytes | None, id_: str, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = cli("inspect", path, code=1)
    assert problems(result) == [f"{path}: {id_}"]
    assert words in result.stderr


def altered(folder: Path, **values: object) -> Path:
    """The package in ``folder``, whose manifest has ``values`` too."""
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(json.dumps(content | values), encoding="utf-8")
    return folder


def test_all_that_is_wrong_with_packages_is_one_message(
    cli: Cli, wheel: Path, tmp_path: Path
) -> None:
    for name in ("one", "two", "valid"):
        shutil.unpack_archive(wheel, tmp_path / name, "zip")
    altered(tmp_path / "one" / "my_app" / "epcontext", schema_version="2.0")
    altered(tmp_path / "two" / "my_app" / "epcontext", layout="flat")
    assert problems(cli("inspect", tmp_path, code=1)) == [
        f"{tmp_path}: {name}/my_app/epcontext: EPC508" for name in ("one", "two")
    ]


def test_manifests_of_others_beside_a_package_are_ignored(
    cli: Cli, wheel: Path, tmp_path: Path
) -> None:
    assert cli("inspect", wheel, "--verify").stderr == ""
    both = Path(shutil.copy(wheel, tmp_path))
    with zipfile.ZipFile(both, "a") as archive:
        archive.writestr("odd/manifest.json/", "")
        archive.writestr("static/manifest.json", '{"name": "My app", "icons": []}')
        archive.writestr("other/manifest.json", '{"schema_version": "1.0", "components": {}}')
    found = json.loads(cli("inspect", both, "--json").stdout)
    assert list(found["packages"]) == ["my_app/epcontext"]
    assert cli("inspect", both, "--verify").stderr == ""
    shutil.unpack_archive(both, tmp_path / "installed", "zip")
    found = json.loads(cli("inspect", tmp_path / "installed", "--json").stdout)
    assert list(found["packages"]) == ["my_app/epcontext"]


def test_a_wheel_without_models_names_the_hook(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a-1-py3-none-any.whl"
    zipfile.ZipFile(path, "w").close()
    result = cli("inspect", path, "--verify", code=1)
    assert problems(result) == [f"{path}: EPC505"]
    assert "[tool.hatch.build.hooks.epcontext]" in result.stderr
    assert "HATCH_EPCONTEXT_SKIP" in result.stderr


def test_an_editable_install_is_verified_with_the_sources_in_their_places(
    cli: Cli, project: Path, artifact: Artifact
) -> None:
    folder = project / "my_app" / "epcontext"
    install(resulting(configured(project), artifact), folder)
    assert cli("inspect", folder, "--verify").stdout.endswith("verified: 10 files\n")
    (project / "models" / "a.onnx").unlink()
    (problem,) = problems(cli("inspect", folder, "--verify", code=1))
    assert problem.endswith("a.onnx: EPC506")


def test_inspecting_needs_no_onnx_runtime() -> None:
    code = "import sys; import hatch_epcontext.worker.actions.inspect; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

from __future__ import annotations

import dataclasses
import json
from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext import loader
from hatch_epcontext.files import record_file, record_files
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package.bundle import (
    Bundle,
    bundle,
    import_name,
    import_name_in_tree,
    modules,
)
from tests.models import network, save
from tests.package.conftest import opened
from tests.package.test_manifest import SEVERAL, TWO
from tests.results import MODULES, TOML, Artifact, compiled, configured, resulting


def make(project: Path, toml: str, folder: Path, *, with_loader: bool = True) -> Bundle:
    """The bundle of a project that is configured by ``toml``, made in the new ``folder``."""
    result = compiled(configured(project, toml), folder / "artifacts")
    return bundle(result, folder, MODULES if with_loader else {})


def recorded(bundled: Bundle) -> set[str]:
    """The names of the files that the manifest lists, which must be as they are recorded."""
    package = opened(bundled.folder)
    records = record_files(bundled.folder)
    del records["manifest.json"]
    assert package.files == records
    return set(package.files)


def test_it_has_all_files_and_the_manifest_lists_them(
    project: Path, artifact: Artifact, tmp_path: Path
) -> None:
    config = configured(project, TOML + 'fallback = "source"')
    bundled = bundle(resulting(config, artifact), tmp_path, MODULES)
    assert set(bundled.files) == {
        "__init__.py",
        "__pyinstaller/__init__.py",
        "__pyinstaller/hook-my_app.epcontext.py",
        "_check.py",
        "_runner.py",
        "_user_cache.py",
        "a/cpu/a_ctx.onnx",
        "a/cpu/a_ctx_qnn.bin",
        "a/source/a.onnx",
        "manifest.json",
    }
    assert recorded(bundled) == set(bundled.files) - {"manifest.json"}
    package = opened(bundled.folder)
    models = {name: v.model_file for name, v in package.components["a"].variants.items()}
    assert models == {"cpu": "a/cpu/a_ctx.onnx", "source": "a/source/a.onnx"}
    entries = bundled.entries(PurePosixPath("my_app/epcontext"))
    assert entries["my_app/epcontext/__init__.py"] == bundled.folder / "__init__.py"
    assert entries["my_app/epcontext/manifest.json"] == bundled.folder / "manifest.json"


@pytest.mark.parametrize(
    ("toml", "models"),
    [(TOML, ["a"]), (TWO, ["b", "a"]), (SEVERAL, ["det"]), (TOML + 'fallback = "source"', ["a"])],
)
def test_the_loader_reads_it(toml: str, models: list[str], project: Path, tmp_path: Path) -> None:
    bundled = make(project, toml, tmp_path)
    assert (bundled.folder / "__init__.py").read_bytes() == Path(loader.__file__).read_bytes()
    assert loader.models(package=bundled.folder) == models
    for name in models:
        with loader.path(name, package=bundled.folder) as file:
            assert file.is_file()


def test_the_loader_verifies_the_manifest(project: Path, tmp_path: Path) -> None:
    bundled = make(project, TOML, tmp_path)

    def reason() -> str | None:
        with pytest.raises(loader.LoadError) as raised:
            loader.load("a", package=bundled.folder, verify=True)
        return raised.value.attempts[0].reason

    # The artifact is a stand-in.
    changed = f"manifest.json {loader._CHANGED}"
    assert reason() != changed
    manifest = bundled.folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"portable"', b'"portable" '))
    assert reason() == changed


def test_models_that_name_one_file_ship_it_once(project: Path, tmp_path: Path) -> None:
    toml = """
targets.cpu.provider = "cpu"
fallback = "source"
models = ["models/a.onnx", "models/b.onnx"]
"""
    (project / "models" / "w.bin").write_bytes(b"weights")
    result = compiled(configured(project, toml), tmp_path / "artifacts")
    weights = {"w.bin": record_file(project / "models" / "w.bin")}
    sources = tuple(
        dataclasses.replace(source, records={**source.records, **weights})
        for source in result.sources
    )
    bundled = bundle(Result(sources, result.built), tmp_path, MODULES)
    names = {"a/source/a.onnx", "a/source/b.onnx", "a/source/w.bin"}
    assert {name for name in recorded(bundled) if "source" in name} == names
    package = opened(bundled.folder)
    files = {name: c.variants["source"].model_file for name, c in package.components.items()}
    assert files == {"a": "a/source/a.onnx", "b": "a/source/b.onnx"}


CPU_ONLY = TOML
NPU_ONLY = """
models = ["models/a.onnx"]
targets.openvino = { provider = "openvino", device = "npu" }
"""


@pytest.mark.parametrize(
    ("toml", "shipped"),
    [
        (CPU_ONLY, False),
        (CPU_ONLY + 'fallback = "source"', True),
        (CPU_ONLY + 'fallback = "none"', False),
        (NPU_ONLY, True),
        (NPU_ONLY + 'fallback = "none"', False),
        # These run on some machines only.
        (CPU_ONLY + 'targets.cpu.platforms = ["win_amd64"]', True),
        (CPU_ONLY + 'targets.cpu.optimization = "all"', True),
        (NPU_ONLY.replace('"npu"', '"cpu"'), True),
    ],
)
def test_the_source_is_shipped_unless_any_machine_runs_a_target(
    toml: str, shipped: bool, project: Path, tmp_path: Path
) -> None:
    result = compiled(configured(project, toml), tmp_path / "artifacts")
    bundled = bundle(result, tmp_path, MODULES)
    assert any("source" in name for name in recorded(bundled)) == shipped
    (component,) = json.loads((bundled.folder / "manifest.json").read_text("utf-8"))[
        "components"
    ].values()
    assert ("source" in component["variants"]) == shipped


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("my_app/epcontext", "my_app.epcontext"),
        ("models", "models"),
        ("my-app/epcontext", None),
        ("my_app/class", None),
        ("my_app/1", None),
        ("", None),
    ],
)
def test_the_name_by_which_python_imports_a_folder(path: str, name: str | None) -> None:
    assert import_name(PurePosixPath(path)) == name


def test_the_name_by_which_python_imports_a_folder_of_a_source_tree(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "my_app" / "sub"
    folder.mkdir(parents=True)
    # The folder itself may not be there yet.
    assert import_name_in_tree(folder / "epcontext") is None
    (folder / "__init__.py").touch()
    assert import_name_in_tree(folder / "epcontext") == "sub.epcontext"
    (folder.parent / "__init__.py").touch()
    assert import_name_in_tree(folder / "epcontext") == "my_app.sub.epcontext"
    assert import_name_in_tree(folder / "my-models") is None


@pytest.mark.parametrize("recompile", ["true", "false"])
def test_modules_are_shipped_only_where_a_model_needs_them(tmp_path: Path, recompile: str) -> None:
    toml = f"""
    models = ["models/a.onnx", "models/b.onnx"]
    [targets.cpu]
    provider = "cpu"
    [targets.npu]
    provider = "qnn"
    chip = "snapdragon-x-elite"
    recompile = {recompile}
    """
    for name in ("a", "b"):
        save(network(), tmp_path / "models" / f"{name}.onnx")
    shipped = modules(None, configured(tmp_path, toml).models)
    assert ("_recompile.py" in shipped) == (recompile == "true")

"""Wheels and sdists of projects whose models are on a hub, which runs on this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from hatchling.plugin.manager import PluginManager

from hatch_epcontext.config.location import LAYOUT, Download
from tests.hub import COMMIT, TOKEN, Hub, model_hub, sha256
from tests.integration.conftest import build_here, run, tool
from tests.models import network, save_with_data
from tests.projects import HEAD

CONFIGURATION = """
[tool.epcontext]
targets.cpu.provider = "cpu"
fallback = "source"
wheel = { sbom = true }

[[tool.epcontext.models]]
name = "encoder"
license = "Apache-2.0"
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "files"
    save_with_data(network(1), folder / "m.onnx")
    files = {f"onnx/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with model_hub(files) as running:
        for name in [name for name in os.environ if name.startswith(("HF_", "HATCH_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        running.private = True
        yield running


def download(hub: Hub) -> Download:
    data = {"network.data": sha256(hub.files["onnx/network.data"])}
    return Download(hub.location("onnx/m.onnx"), sha256(hub.files["onnx/m.onnx"]), data)


def make_project(folder: Path, model: str) -> Path:
    (folder / "my_app").mkdir(parents=True)
    (folder / "my_app" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(HEAD + CONFIGURATION + model, encoding="utf-8")
    return folder


def remote(folder: Path, hub: Hub, more: str = "") -> Path:
    """A project whose model is on the hub."""
    model = download(hub)
    data = ", ".join(f'"{name}" = "{digest}"' for name, digest in model.data.items())
    return make_project(
        folder,
        f'url = "{model.url}"\nsha256 = "{model.sha256}"\ndata = {{ {data} }}\n{more}',
    )


def without_source(project: Path) -> Path:
    """The project, whose wheel needs no source."""
    file = project / "pyproject.toml"
    text = file.read_text(encoding="utf-8").replace('fallback = "source"\n', "")
    file.write_text(text, encoding="utf-8")
    return project


def local(folder: Path, files: Path) -> Path:
    """The same project with the model itself."""
    shutil.copytree(files, make_project(folder, 'path = "models/m.onnx"\n') / "models")
    return folder


def wheel(project: Path) -> bytes:
    (path,) = (project / "dist").glob("*.whl")
    content = path.read_bytes()
    path.unlink()
    return content


def names(project: Path) -> list[str]:
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return [name.partition("/")[2] for name in tar.getnames()]


def unpacked(project: Path, folder: Path) -> Path:
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def sbom_model(content: bytes, folder: Path) -> dict[str, Any]:
    """The source model in the SBOM of a wheel."""
    (folder / "a.whl").write_bytes(content)
    with zipfile.ZipFile(folder / "a.whl") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".cdx.json"))
        components = json.loads(archive.read(name))["components"]
    (model,) = (part for part in components if part["bom-ref"] == "model:encoder")
    result: dict[str, Any] = model
    return result


def without_sbom(content: bytes, folder: Path) -> dict[str, bytes]:
    """The files of a wheel but its SBOM, which names the location, and its RECORD."""
    (folder / "b.whl").write_bytes(content)
    with zipfile.ZipFile(folder / "b.whl") as archive:
        names = [name for name in archive.namelist() if not name.endswith((".cdx.json", "RECORD"))]
        return {name: archive.read(name) for name in names}


def test_the_wheel_is_that_of_a_local_model_also_from_an_sdist(hub: Hub, tmp_path: Path) -> None:
    ours, cache = local(tmp_path / "local", tmp_path / "files"), tmp_path / "cache"
    build_here(ours, cache)
    theirs = remote(tmp_path / "remote", hub)
    env = {**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(cache)}
    run(sys.executable, "-m", "build", "-n", theirs, cwd=theirs, env=env)
    assert not any("onnx" in name or "data" in name for name in names(theirs))
    first = wheel(theirs)
    assert without_sbom(first, tmp_path) == without_sbom(wheel(ours), tmp_path)
    assert sorted(hub.downloads) == ["m.onnx"]
    model = sbom_model(first, tmp_path)
    assert model["purl"] == f"pkg:huggingface/org/repo@{COMMIT}#onnx/m.onnx"
    assert model["hashes"] == [{"alg": "SHA-256", "content": download(hub).sha256}]
    # An unpacked sdist on a machine without a network.
    again, other = unpacked(theirs, tmp_path / "unpacked"), tmp_path / "other"
    refused = build_here(again, other, fails=True, OFFLINE="1")
    assert "EPC220" in refused
    assert "epcontext fetch" in refused
    env |= {"HATCH_EPCONTEXT_CACHE_DIR": str(other)}
    run(tool("epcontext"), "fetch", cwd=again, env=env)
    build_here(again, other, OFFLINE="1")
    assert wheel(again) == first


def test_a_cut_model_is_taken_from_the_cache_of_this_machine(hub: Hub, tmp_path: Path) -> None:
    project = without_source(remote(tmp_path / "remote", hub, 'cut = { outputs = ["r"] }\n'))
    cache = tmp_path / "cache"
    build_here(project, cache)
    first = wheel(project)
    build_here(project, cache, FROM_CACHE="all", OFFLINE="1")
    assert wheel(project) == first
    # What is cut is compared with what was cut before.
    shutil.rmtree(cache / LAYOUT / "models")
    assert "EPC220" in build_here(project, cache, fails=True, FROM_CACHE="all", OFFLINE="1")
    build_here(project, cache, FROM_CACHE="all")
    assert wheel(project) == first


@pytest.mark.parametrize("from_cache", [False, True])
def test_an_editable_install_has_a_copy(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_cache: bool
) -> None:
    project, cache = remote(tmp_path / "remote", hub), tmp_path / "cache"
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(cache))
    if from_cache:
        build_here(without_source(project), cache)
        shutil.rmtree(cache / LAYOUT / "models")
        monkeypatch.setenv("HATCH_EPCONTEXT_FROM_CACHE", "all")
    builder = WheelBuilder(str(project), plugin_manager=PluginManager())
    list(builder.build(directory=str(project / "dist"), versions=["editable"]))
    shutil.rmtree(cache)
    copy = project / "my_app" / "epcontext" / "encoder" / "source" / "m.onnx"
    assert copy.read_bytes() == hub.files["onnx/m.onnx"]
    code = "from my_app.epcontext import load; print(load('encoder').get_inputs()[0].name)"
    assert run(sys.executable, "-c", code, cwd=project, env=os.environ) == "x\n"


def test_a_location_on_the_web_is_not_in_the_sbom(hub: Hub, tmp_path: Path) -> None:
    project, cache = remote(tmp_path / "remote", hub), tmp_path / "cache"
    file = project / "pyproject.toml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(hub.location("onnx/m.onnx"), hub.web("onnx/m.onnx")), "utf-8")
    build_here(project, cache)
    model = sbom_model(wheel(project), tmp_path)
    assert "purl" not in model
    assert hub.site not in json.dumps(model)

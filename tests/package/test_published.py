"""The extras of projects of any back end, and companions that were published before."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from hatch_epcontext.cli.app import app
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, DownloadError, Key, RequirementError
from hatch_epcontext.package.companions import (
    Companion,
    pinned,
    project_metadata,
    published_version,
)
from hatch_epcontext.package.wheel import ProjectMetadata
from hatch_epcontext.project_build import ProjectBuild, Terminal
from tests.config.examples import read
from tests.models import network, save

PIN = "my-app-models-cpu==3"

STATIC = f"""
[project]
name = "my-app"
dynamic = ["version"]
optional-dependencies.cpu = ["{PIN}; sys_platform == 'linux' or sys_platform == 'win32'"]
"""

POETRY = f"""
[tool.epcontext]
models = [{{ url = "https://host/a.onnx", sha256 = "{"0" * 64}" }}]
targets.cpu.provider = "cpu"
[tool.epcontext.build]
backend = "poetry.core.masonry.api"
[tool.poetry]
name = "my-app"
version = "1.0"
description = ""
authors = []
packages = [{{ include = "my_app" }}]
[tool.poetry.dependencies]
{PIN.partition("=")[0]} = {{ version = "3", optional = true }}
[tool.poetry.extras]
cpu = ["{PIN.partition("=")[0]}"]
"""


@pytest.mark.parametrize("text", [STATIC, POETRY])
def test_the_extras_of_a_project_are_known_before_its_wheel(text: str, tmp_path: Path) -> None:
    (tmp_path / "my_app").mkdir()
    (tmp_path / "my_app" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    metadata = project_metadata(tmp_path, parse(text).get("project", {}), by_hatch=False)
    (requirement,) = map(Requirement, metadata.dependencies)
    assert (metadata.name, requirement.name, str(requirement.specifier)) == (
        "my-app", "my-app-models-cpu", "==3",
    )  # fmt: skip
    assert 'extra == "cpu"' in str(requirement.marker)


def test_a_back_end_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    text = POETRY.replace("poetry.core.masonry.api", "no_such.backend")
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(RequirementError, match=r"what \[build-system\] requires") as raised:
        project_metadata(tmp_path, {}, by_hatch=False)
    assert "no_such" in str(raised.value.problems[0].log)


def test_a_project_that_hatchling_refuses_is_an_error(tmp_path: Path) -> None:
    table = {
        "name": "my-app",
        "optional-dependencies": {"cpu": ["my-app-models @ https://x.org/a"]},
    }
    with pytest.raises(
        ConfigError, match=r"hatchling cannot read the project: .* direct reference"
    ):
        project_metadata(tmp_path, table, by_hatch=False)


TOML = """
models = ["models/a.onnx"]
[targets.cpu]
provider = "cpu"
companion = "my-app-models-cpu"
"""


def build(config: Config, version: str) -> tuple[Path, Companion]:
    project = ProjectMetadata(
        "my-app", "1.0", None, (f"my-app-models-cpu=={version}; extra == 'cpu'",)
    )
    (companion,) = pinned(config, project)
    builder = ProjectBuild(config.root, Terminal(print, print))
    wheel = builder.write_companion(config, project, companion)
    kept = shutil.copy(wheel, config.root / "dist")
    builder.close()
    return Path(kept), companion


@pytest.fixture
def published(tmp_path: Path) -> Iterator[str]:
    """The URL of an index in the folder ``index``."""
    (tmp_path / "index").mkdir()
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("url", ["http://a b", "http://[a", "ab://c"])
def test_an_address_that_is_none_is_an_error_that_names_it(url: str) -> None:
    companion = Companion("my-app-models", "my_app_models", "1", "my-app[cpu]", Key())
    with pytest.raises(DownloadError, match=re.escape(f"{url}/my-app-models/ cannot be downl")):
        published_version(Path("my_app_models-1-py3-none-any.whl"), companion, url)


@pytest.mark.slow
def test_companions_with_the_same_models_are_found_in_a_folder_and_an_index(
    tmp_path: Path, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    (tmp_path / "dist").mkdir()
    save(network(1), tmp_path / "models" / "a.onnx")
    config = read(tmp_path, TOML, CACHE_DIR=str(tmp_path / "cache"))
    first, companion = build(config, "3")
    content = first.read_bytes()
    assert build(config, "3")[0].read_bytes() == content
    old, page = tmp_path / "old #1", tmp_path / "index" / companion.name
    old.mkdir()
    assert published_version(first, companion, str(old)) is None
    assert published_version(first, companion, published) is None
    shutil.move(first, old)
    page.mkdir()
    shutil.copy(old / first.name, page)
    (page / "index.html").write_text(f'<a href="{quote(first.name)}?a=/b#sha256=0">x</a>')
    # Other bytes, and the same models: a board has validated them.
    tables = TOML.replace("[targets", "[tool.epcontext.targets")
    (tmp_path / "pyproject.toml").write_text(f"[tool.epcontext]{tables}", encoding="utf-8")
    report = str(tmp_path / "report.json")
    command = ["validate", "--package", str(old / first.name), "--sdist", str(tmp_path)]
    assert CliRunner().invoke(app, [*command, "--report", report]).exit_code == 0
    config = replace(config, validated_on=tmp_path / "report.json")
    again, newer = build(config, "3"), build(config, "4")
    assert again[0].read_bytes() != content
    assert b'"boards": [\n' in zipfile.ZipFile(again[0]).read("my_app_models_cpu/manifest.json")
    for place in (str(old), published, f"{published}/"):
        assert [published_version(*made, place) for made in (again, newer)] == ["3", "3"]
    save(network(2), tmp_path / "models" / "a.onnx")
    changed, new = build(config, "3"), build(config, "4")
    for place in (str(old), published):
        assert published_version(*new, place) is None
        with pytest.raises(ConfigError, match="version 3 of my-app-models-cpu is published with"):
            published_version(*changed, place)

"""The hook in hatchling's own builder, with real workers for the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import hatchling.build
import onnx
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.plugin.manager import PluginManager

from hatch_epcontext.jobs import requirements
from hatch_epcontext.jobs.requirements import TOOLS
from hatch_epcontext.package import bundle as package_bundle
from hatch_epcontext.package import wheel
from hatch_epcontext.plugin import EpcontextBuildHook
from hatch_epcontext.text import printable
from tests import projects
from tests.conftest import needs, needs_qnn
from tests.models import network, save, save_with_data, unknown_operator
from tests.package.conftest import opened

pytestmark = pytest.mark.one_cache

PROJECT = (
    projects.PROJECT
    + """
targets.cpu.provider = "cpu"
models = ["models/*.onnx"]
"""
)


@pytest.fixture
def root(project: Path) -> Path:
    """A complete project with one real model."""
    (project / "models" / "b.onnx").unlink()
    save(network(), project / "models" / "a.onnx")
    (project / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    return project


def configure(root: Path, more: str) -> None:
    (root / "pyproject.toml").write_text(PROJECT + more, encoding="utf-8")


def make(root: Path, version: str = "standard", **options: Any) -> Path:
    """Build the wheel of ``root``."""
    builder = WheelBuilder(str(root), plugin_manager=PluginManager())
    (path,) = builder.build(directory=str(root / "dist"), versions=[version], **options)
    return Path(path)


def failure(root: Path, capsys: pytest.CaptureFixture[str], version: str = "standard") -> str:
    """The message when the build of ``root`` fails."""
    with pytest.raises(SystemExit):
        make(root, version)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_at_its_end_a_build_looks_for_no_garbage_in_what_it_has_imported() -> None:
    # What is registered first is called last.
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); "
        "import hatch_epcontext.project_build"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) > 10_000


def test_the_environment_sets_the_path_of_the_report(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    monkeypatch.setenv("HATCH_EPCONTEXT_REPORT", str(page))
    make(root)
    assert "<h1>my-app 1.0</h1>" in page.read_text(encoding="utf-8")
    assert f"epcontext: report: {page}" in capsys.readouterr().err
    save(unknown_operator(), root / "models" / "b.onnx")
    failure(root, capsys)
    assert "cannot be run on the CPU" in page.read_text(encoding="utf-8")


def test_a_wheel_with_an_sbom_is_the_same_each_time(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, "wheel = { sbom = true }\n")
    wheel = make(root)
    first = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        place = "my_app-1.0.dist-info/sboms/epcontext.cdx.json"
        content = json.loads(archive.read(place))
        assert place in archive.read("my_app-1.0.dist-info/RECORD").decode()
    assert content["metadata"]["component"]["purl"] == "pkg:pypi/my-app@1.0"
    assert (
        "tool.epcontext.models[0] (models/a.onnx): no license is known" in capsys.readouterr().err
    )
    wheel.unlink()
    assert make(root).read_bytes() == first


@pytest.mark.own_cache
def test_a_verbose_hatch_shows_what_workers_do(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HATCH_VERBOSE", "1")
    make(root)
    assert "epcontext: a -> cpu: compile ..." in capsys.readouterr().err


def hook(root: Path, target: str = "wheel") -> EpcontextBuildHook:
    builder = WheelBuilder(str(root), plugin_manager=PluginManager())
    return EpcontextBuildHook(str(root), {}, builder.config, builder.metadata, "", target)


def files(root: Path) -> set[str]:
    """All files but those of builds: wheels, and the bytecode of the project's own hooks."""
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and not {"dist", "__pycache__"} & set(path.parts)
    }


def test_the_wheel_has_the_package(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, 'fallback = "source"\n')
    before = files(root)
    wheel = zipfile.ZipFile(make(root))
    names = wheel.namelist()
    assert {name for name in names if name.startswith("my_app/epcontext/")} == {
        "my_app/epcontext/__init__.py",
        "my_app/epcontext/_check.py",
        "my_app/epcontext/_runner.py",
        "my_app/epcontext/_user_cache.py",
        "my_app/epcontext/manifest.json",
        "my_app/epcontext/a/cpu/a_optimized.onnx",
        "my_app/epcontext/a/source/a.onnx",
    }
    assert files(root) == before, "the build changed the project"
    text = capsys.readouterr().err
    assert "epcontext: a -> cpu (cpu): ok, optimized graph, agrees on synthetic inputs" in text
    assert "epcontext: verified the wheel: 6 files as in the manifest, by RECORD" in text
    wheel.extractall(tmp_path / "installed")
    package = opened(tmp_path / "installed" / "my_app" / "epcontext")
    variants = {name: list(model.variants) for name, model in package.components.items()}
    assert (package.layout, variants) == ("portable", {"a": ["cpu", "source"]})


@pytest.mark.own_cache
def test_what_has_not_changed_comes_from_the_cache(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(root).read_bytes()
    assert "from the cache" not in capsys.readouterr().err
    assert make(root).read_bytes() == first
    assert "from the cache" in capsys.readouterr().err
    configure(root, 'targets.cpu.optimization = "all"\n')
    make(root)
    changed = network()
    changed.graph.initializer[0].raw_data = changed.graph.initializer[0].raw_data[::-1]
    save(changed, root / "models" / "a.onnx")
    make(root)
    assert "from the cache" not in capsys.readouterr().err
    # A changed validation needs no new compilation.
    monkeypatch.setenv("HATCH_EPCONTEXT_VALIDATE", "structure")
    make(root)
    text = capsys.readouterr().err
    assert "structure checked, NOT run" in text
    assert "from the cache" in text


@pytest.mark.own_cache
def test_without_a_cache_it_is_compiled_again(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    user_cache: Path,
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_NO_CACHE", "1")
    make(root)
    make(root)
    text = capsys.readouterr().err
    assert "from the cache" not in text
    assert "HATCH_EPCONTEXT_NO_CACHE=1 (from the environment)" in text
    assert not [path for path in user_cache.rglob("*") if path.is_file()]


KEY = f"ed25519:{'A' * 43}="


@pytest.mark.parametrize(
    ("url", "backend"),
    [
        ("s3://bucket/team", ["s3fs>=2025.3"]),
        ("gs://bucket/team", ["gcsfs>=2025.3"]),
        ("az://container/team", ["adlfs>=2024.12"]),
        ("https://host/cache", ["fsspec[http]>=2025.3"]),
        ("file:///mnt/cache", ["fsspec>=2025.3"]),
        ("", []),
    ],
)
def test_the_front_end_installs_the_backend_of_the_shared_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch, url: str, backend: list[str]
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_SHARED_CACHE", url)
    configure(
        root, f'build = {{ shared-cache = "s3://bucket/other", shared-cache-keys = ["{KEY}"] }}\n'
    )
    signatures = ["cryptography>=44"] if url else []
    assert hook(root).dependencies() == ["onnxruntime>=1.23", *TOOLS, *backend, *signatures]
    assert hook(root, "sdist").dependencies() == []


def test_a_skipped_build_says_so_and_has_no_models(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_SKIP", "1")
    assert hook(root).dependencies() == []
    names = zipfile.ZipFile(make(root)).namelist()
    assert not any("epcontext" in name for name in names)
    assert "epcontext: skipped: HATCH_EPCONTEXT_SKIP is set" in capsys.readouterr().err


@needs_qnn
def test_an_editable_install_of_the_sources_asks_for_no_compiler(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(root, '[tool.epcontext.targets.npu]\nprovider = "qnn"\n')
    monkeypatch.chdir(root)
    eps = [
        [name for name in names if name.startswith("onnxruntime-")]
        for names in (
            hatchling.build.get_requires_for_build_wheel(),
            hatchling.build.get_requires_for_build_editable(),
        )
    ]
    assert eps == [["onnxruntime-qnn>=2.7"], []]


@needs("tensorrt_rtx_bindings")
def test_an_app_that_cannot_run_what_is_compiled_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    needs = 'optional-dependencies.gpu = ["onnxruntime-ep-nv-tensorrt-rtx-cu13>=0.6"]\n'
    text = text.replace("[project]\n", f"[project]\n{needs}")
    text = text.replace('"cpu"', '"tensorrt-rtx"\ntargets.cpu.chip = "auto"')
    (root / "pyproject.toml").write_text(text, encoding="utf-8")
    assert ": EPC102\n" in failure(root, capsys)


def test_an_invalid_time_is_an_error_before_anything_is_compiled(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # hatchling accepts none of them.
    for time in ("today", "", "-1", "4354819200"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", time)
        printed = failure(root, capsys)
        assert "SOURCE_DATE_EPOCH: EPC020" in printed
        assert "-> " not in printed


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have only names that are text")
def test_a_file_that_no_wheel_can_have_is_an_error_before_anything_is_compiled(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "my_app" / os.fsdecode(b"t\xff.txt")).touch()
    printed = failure(root, capsys)
    assert (
        "my_app/t\\udcff.txt: EPC027\n    has a name that is not UTF-8, which no wheel" in printed
    )
    assert "-> " not in printed


def test_an_invalid_configuration_is_one_message(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, "jbs = 1\n")
    text = failure(root, capsys)
    line = (root / "pyproject.toml").read_text(encoding="utf-8").split("\n").index("jbs = 1") + 1
    heading = (
        f"epcontext: invalid configuration:\npyproject.toml:{line}: tool.epcontext.jbs: EPC001\n"
    )
    assert text.startswith(heading)


@pytest.mark.own_cache
def test_a_failed_job_is_one_message_and_leaves_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], user_cache: Path
) -> None:
    (root / "models" / "a.onnx").write_text("text", encoding="utf-8")
    assert "a.onnx is not an ONNX model" in failure(root, capsys)
    assert list((root / "dist").iterdir()) == []
    assert not [path for path in user_cache.rglob("*") if path.is_file()]


def test_what_onnxruntime_says_of_a_name_is_shown_as_text(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = unknown_operator()
    # ONNX Runtime names the node only where it knows the domain.
    made.graph.node[0].domain = ""
    made.graph.node[0].name = "\x1b]0;owned\x07[red]\u202e\x9b31m"
    save(made, root / "models" / "a.onnx")
    message = failure(root, capsys)
    assert r"\x1b]0;owned\x07[red]\u202e\x9b31m" in message
    assert printable(message, lines=True) == message


def test_the_tag_is_set_for_the_targets_platforms(root: Path) -> None:
    assert make(root).name == "my_app-1.0-py3-none-any.whl"
    configure(root, 'targets.cpu.platforms = ["win_arm64"]\n')
    path = make(root)
    assert path.name == "my_app-1.0-py3-none-win_arm64.whl"
    text = zipfile.ZipFile(path).read("my_app-1.0.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in text
    assert "Tag: py3-none-win_arm64" in text


def test_platforms_of_some_targets_only_leave_the_tag_as_it_is(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(root, 'targets.more = { provider = "cpu", platforms = ["win_arm64"] }\n')
    assert make(root).name.endswith("-any.whl")
    line = 'the wheel\'s tag stays "any", or that of the build back end: cpu has no platforms'
    assert line in capsys.readouterr().err


def test_a_large_sdist_is_a_warning(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "MAX_SIZE", 1000)
    [*SdistBuilder(str(root), plugin_manager=PluginManager()).build(directory=str(root / "dist"))]
    assert "or let builds download models (url)" in capsys.readouterr().err


def other_hook(root: Path, initialize: str) -> None:
    """A hook of the project's own in ``custom.py``."""
    (root / "custom.py").write_text(
        "from hatchling.builders.hooks.plugin.interface import BuildHookInterface\n"
        "class Hook(BuildHookInterface):\n"
        f"    def initialize(self, version, build_data):\n        {initialize}\n",
        encoding="utf-8",
    )


def test_the_tag_of_another_hook_is_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(
        root,
        'targets.cpu.platforms = ["win_arm64"]\n[tool.hatch.build.hooks.custom]\npath = "custom.py"\n',
    )
    # Hatch runs the hooks in the order of their tables.
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    ours = "[tool.hatch.build.hooks.epcontext]\n"
    (root / "pyproject.toml").write_text(text.replace(ours, "") + ours, encoding="utf-8")
    other_hook(root, "build_data['tag'] = 'py3-none-win_amd64'")
    assert make(root).name.endswith("win_amd64.whl")
    assert "another build hook set the wheel's tag (py3-none-win_amd64)" in capsys.readouterr().err


def test_a_source_layout(root: Path) -> None:
    (root / "src").mkdir()
    (root / "my_app").rename(root / "src" / "my_app")
    names = zipfile.ZipFile(make(root)).namelist()
    assert "my_app/epcontext/manifest.json" in names
    make(root, "editable")
    assert (root / "src" / "my_app" / "epcontext" / "manifest.json").is_file()


def test_an_invalid_wheel_is_removed(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = package_bundle.bundle

    def spoiled(*arguments: Any) -> package_bundle.Bundle:
        made = bundle(*arguments)
        (made.folder / "__init__.py").write_text("changed afterwards", encoding="utf-8")
        return made

    monkeypatch.setattr(package_bundle, "bundle", spoiled)
    assert "__init__.py differs from its record in the manifest" in failure(root, capsys)
    assert list((root / "dist").iterdir()) == []


def test_a_source_that_changes_before_it_is_packed_is_not_shipped(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(root, 'fallback = "source"\n')
    bundle, model = package_bundle.bundle, root / "models" / "a.onnx"

    def changing(*arguments: Any) -> package_bundle.Bundle:
        made = bundle(*arguments)
        model.write_bytes(model.read_bytes() + b"more")
        return made

    monkeypatch.setattr(package_bundle, "bundle", changing)
    assert f"{model}: EPC211\n    was changed or removed after" in failure(root, capsys)
    assert list((root / "dist").iterdir()) == []


def test_an_editable_install_uses_the_source_models_in_place(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = zipfile.ZipFile(make(root, "editable")).namelist()
    assert not any("epcontext" in name for name in names)
    assert files(root / "my_app" / "epcontext") == {
        ".gitignore",
        "__init__.py",
        "_check.py",
        "_runner.py",
        "_user_cache.py",
        "manifest.json",
    }
    assert f"epcontext: wrote {root / 'my_app' / 'epcontext'}" in capsys.readouterr().err


def test_an_editable_install_that_fails_later_leaves_nothing(root: Path) -> None:
    table = "[tool.hatch.build.targets.wheel.hooks.custom]\npath = 'custom.py'\n"
    configure(root, table)
    other_hook(root, "raise RuntimeError('the other hook fails')")
    before = files(root)
    with pytest.raises(RuntimeError, match="the other hook fails"):
        make(root, "editable")
    assert files(root) == before


@pytest.mark.parametrize("more", ["", '[tool.hatch.build]\ndev-mode-dirs = ["."]\n'])
def test_an_editable_install_needs_what_hatch_imports_for_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    configure(root, more)
    real = requirements.installed
    monkeypatch.setattr(
        requirements, "installed", lambda name: None if name == "editables" else real(name)
    )
    if more:
        make(root, "editable")
        return
    before = files(root)
    message = failure(root, capsys, "editable")
    assert 'pip install "editables' in message
    assert "Or build with isolation" in message
    assert files(root) == before


def test_compiled_files_of_an_editable_install_are_not_in_the_next_wheel(root: Path) -> None:
    plain = make(root).read_bytes()
    configure(root, 'editable = "compile"\n')
    make(root, "editable")
    assert (root / "my_app" / "epcontext" / "a" / "cpu" / "a_optimized.onnx").is_file()
    (root / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    assert make(root).read_bytes() == plain


def test_an_editable_install_can_do_without_models(root: Path) -> None:
    configure(root, 'editable = "skip"\n')
    before = files(root)
    make(root, "editable")
    assert files(root) == before


def test_one_file_may_be_two_models(root: Path) -> None:
    text = PROJECT.replace('models = ["models/*.onnx"]\n', 'fallback = "source"\n')
    for name, size in (("one", 1), ("bundle", 2)):
        text += '[[tool.epcontext.models]]\npath = "models/a.onnx"\n'
        text += f'name = "{name}"\ndims = {{ batch = {size} }}\n'
    (root / "pyproject.toml").write_text(text, encoding="utf-8")
    names = zipfile.ZipFile(make(root)).namelist()
    for name in ("one", "bundle"):
        assert f"my_app/epcontext/{name}/cpu/{name}_optimized.onnx" in names
    assert [name for name in names if "/source/" in name] == ["my_app/epcontext/one/source/a.onnx"]


def test_a_project_of_only_models_sets_the_output_folder(root: Path) -> None:
    (root / "my_app" / "__init__.py").unlink()
    configure(root, 'output = "my_models"\n')
    names = zipfile.ZipFile(make(root)).namelist()
    assert "my_models/manifest.json" in names


@pytest.mark.parametrize("external", [False, True])
def test_a_large_wheel_is_one_warning_and_before_compiling_its_models_are_another(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    external: bool,
) -> None:
    monkeypatch.setattr("hatch_epcontext.package.wheel.MAX_SIZE", 1000)
    if external:
        save_with_data(network(), root / "models" / "a.onnx")
    files = [*(root / "models").glob("a.onnx"), *(root / "models").glob("*.data")]
    assert len(files) == 1 + external
    make(root)
    text = capsys.readouterr().err
    assert text.count("By default package indexes accept files of up to") == 1
    size = sum(file.stat().st_size for file in files)
    models = f"the models for this wheel have {size / 1000:.1f} kB, and"
    assert text.index(models) < text.index("By default package indexes")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
def test_a_model_in_the_cache_of_the_hugging_face_hub(root: Path) -> None:
    """Its files are links into one folder; the wheel has the files themselves."""
    path = save_with_data(network(), root / "models" / "a.onnx")
    configure(root, 'fallback = "source"\n')
    (root / "blobs").mkdir()
    links = {path: root / "blobs" / "4d", path.with_name("network.data"): root / "blobs" / "7a"}
    for link, blob in links.items():
        link.rename(blob)
        link.symlink_to(f"../blobs/{blob.name}")
    linked = make(root).read_bytes()
    for link, blob in links.items():
        blob.replace(link)
    assert make(root).read_bytes() == linked


def test_a_source_with_data_in_several_files_and_folders(root: Path) -> None:
    made = network()
    for tensor in made.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, f"weights/{tensor.name}.bin")
    (root / "models" / "weights").mkdir()
    onnx.save(made, root / "models" / "a.onnx")
    names = {"w.bin", "b.bin", "dense.bin"}
    assert {file.name for file in (root / "models" / "weights").iterdir()} == names
    before = {path: path.read_bytes() for path in (root / "models").rglob("*") if path.is_file()}
    configure(root, 'fallback = "source"\n')
    inside = zipfile.ZipFile(make(root)).namelist()
    for name in names:
        assert f"my_app/epcontext/a/source/weights/{name}" in inside
    assert {path: path.read_bytes() for path in before} == before
    # The data is part of the fingerprint.
    first = make(root).read_bytes()
    data = root / "models" / "weights" / "b.bin"
    data.write_bytes(bytes(data.stat().st_size))
    assert make(root).read_bytes() != first
    # Without the source, none of it is needed.
    configure(root, 'fallback = "none"\n')
    assert not [name for name in zipfile.ZipFile(make(root)).namelist() if "weights" in name]

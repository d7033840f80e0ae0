from __future__ import annotations

import dataclasses
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    EpcontextError,
    Kind,
    ModelError,
    OutputError,
    Problem,
)
from hatch_epcontext.files import FileRecord, is_intact
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import Plan
from hatch_epcontext.package.folder import own_files
from hatch_epcontext.tools.compiling import CompileResult, Run, compile_models, export
from hatch_epcontext.tools.configure import is_file
from tests.results import Artifact, configured, resulting

pytestmark = pytest.mark.one_cache

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'
WITH_SOURCE = TOML + 'fallback = "source"\n'

Write = Callable[..., CompileResult]
Tree = dict[str, bytes | None]

both = pytest.mark.parametrize("write", [compile_models, partial(export, loader=False)])
"""Results are files, or a model package."""


@pytest.fixture
def config(project: Path) -> Config:
    return configured(project, TOML)


@pytest.fixture
def shipping(project: Path) -> Config:
    return configured(project, WITH_SOURCE)


@pytest.fixture
def run(shipping: Config, artifact: Artifact) -> Run:
    return lambda planned, staging: resulting(shipping, artifact)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "out"


def never(planned: Plan, staging: Path) -> Result:
    raise AssertionError("nothing shall be compiled")


def tree(folder: Path) -> Tree:
    """All files and folders below ``folder``; folders have no contents."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def recorded(folder: Path) -> Mapping[str, FileRecord]:
    files = own_files(folder)
    assert files is not None
    return files


@pytest.mark.parametrize(("place", "name"), [("out", "a_ctx.onnx"), ("model.onnx", "model.onnx")])
def test_sidecars_come_before_context_models_which_can_have_another_name(
    config: Config, run: Run, tmp_path: Path, place: str, name: str
) -> None:
    files = compile_models(config, tmp_path / "new" / place, run, overwrite=False).files
    assert [file.name for file in files] == ["a_ctx_qnn.bin", name]
    # Nothing else is left.
    assert {*files} == {*files[0].parent.iterdir()}


def test_existing_files_are_only_replaced_with_overwrite(
    config: Config, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "a_ctx_qnn.bin").write_bytes(b"theirs")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"a_ctx_qnn\.bin: EPC501\n    exists already"):
        compile_models(config, tmp_path, run, overwrite=False)
    assert tree(tmp_path) == before
    compile_models(config, tmp_path, run, overwrite=True)
    assert (tmp_path / "a_ctx.onnx").read_bytes() == b"context"


@pytest.mark.parametrize(
    ("place", "name"),
    [("", "a_ctx.onnx"), ("any.onnx", "any.onnx"), ("", "a_ctx_qnn.bin")],
)
def test_existing_files_are_refused_before_anything_is_compiled(
    project: Path, tmp_path: Path, place: str, name: str
) -> None:
    config = configured(project, TOML.replace('"cpu"', '"qnn"'))
    (tmp_path / name).write_bytes(b"theirs")
    with pytest.raises(OutputError, match=f"{name}: EPC501"):
        compile_models(config, tmp_path / place, never, overwrite=False)


def test_a_context_that_cannot_be_replaced_keeps_its_sidecar(
    config: Config, run: Run, out: Path
) -> None:
    (out / "a_ctx.onnx").mkdir(parents=True)
    (out / "a_ctx_qnn.bin").write_bytes(b"theirs")
    before = tree(out)
    with pytest.raises(OutputError, match=r"a_ctx\.onnx"):
        compile_models(config, out, run, overwrite=True)
    assert tree(out) == before


def test_only_a_single_model_can_be_compiled_into_a_file(tmp_path: Path) -> None:
    assert is_file(tmp_path / "a.onnx", ["a"])
    assert not is_file(tmp_path / "out", ["a", "b"])
    (tmp_path / "b.onnx").mkdir()
    assert not is_file(tmp_path / "b.onnx", ["a", "b"])
    with pytest.raises(ConfigError, match="several models need a folder"):
        is_file(tmp_path / "a.onnx", ["a", "b"])


@pytest.mark.parametrize(
    ("write", "place"),
    [
        (compile_models, "models/../models/a.onnx"),
        (partial(export, loader=False), "models"),
        (partial(export, loader=False), "."),
    ],
)
def test_a_source_is_never_replaced(
    config: Config, run: Run, project: Path, write: Write, place: str
) -> None:
    before = tree(project)
    refused = r"is a file of the source model|has files that this tool did not write"
    with pytest.raises(OutputError, match=refused):
        write(config, project / place, run, overwrite=True)
    assert tree(project) == before


def test_a_package_does_not_replace_its_own_source(
    shipping: Config, run: Run, out: Path, artifact: Artifact
) -> None:
    export(shipping, out, run, loader=False, overwrite=False)
    exported = configured(out, TOML.replace("models/a", "a/source/a"))
    with pytest.raises(OutputError, match="is a file of the source model"):
        export(
            exported, out, lambda *_: resulting(exported, artifact), loader=False, overwrite=True
        )


@pytest.mark.parametrize("output", ["file", "file/out/a.onnx"])
@both
def test_an_output_below_a_file_is_an_error(
    config: Config, tmp_path: Path, write: Write, output: str
) -> None:
    (tmp_path / "file").write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"file: EPC501\n    is a file, and not a folder"):
        write(config, tmp_path / output, never, overwrite=True)


@both
def test_a_failed_build_writes_nothing(config: Config, tmp_path: Path, write: Write) -> None:
    def fails(planned: Plan, staging: Path) -> Result:
        raise BuildError(Problem(Kind.NOTHING_COMPILED, "a", "nothing was compiled."))

    before = tree(tmp_path)
    with pytest.raises(BuildError):
        write(config, tmp_path / "deep" / "out", fails, overwrite=False)
    assert tree(tmp_path) == before


@both
def test_a_place_that_cannot_be_written_to_is_named(
    config: Config, out: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(dir: Path) -> None:  # noqa: A002
        raise PermissionError(13, "Permission denied", f"{dir}/x")

    monkeypatch.setattr(tempfile, "TemporaryFile", fails)
    with pytest.raises(OutputError) as caught:
        write(config, out, never, overwrite=False)
    assert caught.value.problems[0].kind is Kind.SYSTEM_ERROR
    assert f": {out.parents[1]}." in caught.value.problems[0].message


def test_the_folder_has_the_manifest_and_copies_of_the_artifacts_and_the_sources(
    shipping: Config, run: Run, out: Path, project: Path, artifact: Artifact
) -> None:
    result = export(shipping, out, run, loader=False, overwrite=False)
    names = ["a/cpu/a_ctx.onnx", "a/cpu/a_ctx_qnn.bin", "a/source/a.onnx", "manifest.json"]
    assert sorted(name for name, content in tree(out).items() if content is not None) == names
    # The manifest is written last, and names all others.
    assert result.files == (*(out / name for name in recorded(out)), out / "manifest.json")
    assert all(is_intact(out / name, record) for name, record in recorded(out).items())
    assert (out / "a/source/a.onnx").read_bytes() == (project / "models/a.onnx").read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (out / "a/source/a.onnx").write_bytes(b"changed")
    (out / "a/cpu/a_ctx.onnx").write_bytes(b"changed")
    assert (project / "models" / "a.onnx").read_bytes() == b"model a"
    assert (artifact.folder / "a_ctx.onnx").read_bytes() == b"context"


def test_an_earlier_package_is_only_replaced_with_overwrite_and_then_as_a_whole(
    shipping: Config, run: Run, out: Path, project: Path, artifact: Artifact
) -> None:
    export(shipping, out, run, loader=True, overwrite=False)
    (out / "__pycache__").mkdir()
    (out / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"bytecode")
    (out / "a/cpu/a_ctx.onnx").write_bytes(b"changed")
    before = tree(out)
    with pytest.raises(OutputError, match=r"out: EPC501\n    exists already\."):
        export(shipping, out, never, loader=True, overwrite=False)
    assert tree(out) == before
    other = configured(project, WITH_SOURCE.replace('"source"', '"none"'))
    export(other, out, lambda _, staging: resulting(other, artifact), loader=False, overwrite=True)
    assert tree(out).keys() == {
        "manifest.json", "a", "a/cpu", "a/cpu/a_ctx.onnx", "a/cpu/a_ctx_qnn.bin",
    }  # fmt: skip
    assert (out / "a/cpu/a_ctx.onnx").read_bytes() == b"context"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("edit", ["a source", "a file"])
def test_what_changes_while_it_is_compiled_is_an_error(
    shipping: Config, run: Run, out: Path, project: Path, edit: str
) -> None:
    changed = project / "models/a.onnx" if edit == "a source" else out / "theirs.txt"

    def changing(planned: Plan, staging: Path) -> Result:
        result = run(planned, staging)
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_bytes(b"theirs")
        return result

    message = r"was changed or removed" if edit == "a source" else r"theirs\.txt"
    error: type[EpcontextError] = ModelError if edit == "a source" else OutputError
    with pytest.raises(error, match=message):
        export(shipping, out, changing, loader=False, overwrite=True)
    assert [path for path in out.rglob("*") if path != changed] == []
    assert changed.read_bytes() == b"theirs"


def test_what_was_there_comes_back_when_a_file_cannot_be_replaced(
    shipping: Config, run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(shipping, out, run, loader=False, overwrite=False)
    (out / "a/cpu/a_ctx.onnx").write_bytes(b"earlier")
    before, replace = tree(out.parent), Path.replace

    def fails(path: Path, target: Path) -> Path:
        if path.parent.name == "ready" and target.name == "manifest.json":
            raise PermissionError(errno.EACCES, "it is in use", str(target))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OutputError, match="in use"):
        export(shipping, out, run, loader=False, overwrite=True)
    assert tree(out.parent) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes with a path of that kind")
def test_a_pipe_in_place_of_the_manifest_holds_nobody_up(config: Config, out: Path) -> None:
    out.mkdir(parents=True)
    os.mkfifo(out / "manifest.json")
    with pytest.raises(OutputError, match="never overwritten"):
        export(config, out, never, loader=False, overwrite=True)


@pytest.mark.skipif(os.name == "nt", reason="Windows needs a privilege for links")
def test_a_link_stays_a_link(shipping: Config, run: Run, out: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    out.parent.mkdir()
    out.symlink_to(tmp_path / "real")
    export(shipping, out, run, loader=False, overwrite=False)
    assert out.is_symlink()
    assert (tmp_path / "real" / "manifest.json").is_file()


def test_a_package_without_any_model_is_an_error(config: Config, out: Path) -> None:
    with pytest.raises(OutputError, match="no model would be in it"):
        export(dataclasses.replace(config, models=()), out, never, loader=False, overwrite=False)

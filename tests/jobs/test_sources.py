"""Models that real workers read, and an index that spares the second reading."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import onnx
import pytest

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.jobs import sources as sources_module
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.sources import read_sources
from tests.models import network, save, save_with_data

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


class Reader:
    """Reads the models of a project; counts the workers that it needs."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.project = project
        self.folder = folder
        self.workers = 0

    def read(self, toml: str = TOML, environ: dict[str, str] | None = None) -> tuple[Source, ...]:
        config = load(self.project, parse(toml), {}, environ or {})
        scratch = self.folder / f"check-{self.workers}"
        try:
            return read_sources(config, Cache(self.folder / "cache", print), Workers(120), scratch)
        finally:
            self.workers += scratch.exists()


@pytest.fixture
def reader(project: Path, tmp_path: Path) -> Reader:
    save(network(), project / "models" / "a.onnx")
    return Reader(project, tmp_path)


def test_a_model_is_read_by_one_worker_only_once(reader: Reader) -> None:
    first = reader.read()
    assert first[0].facts.inputs[0].shape == ("batch", 1, 8, 8)
    assert reader.read() == first
    assert reader.workers == 1


def test_a_copy_of_a_known_model_needs_no_worker(reader: Reader, project: Path) -> None:
    first = reader.read()
    # As in a freshly unpacked sdist: another inode, and other times.
    model = project / "models" / "a.onnx"
    shutil.copyfile(model, model.with_suffix(".copy"))
    model.with_suffix(".copy").replace(model)
    assert reader.read() == first
    assert reader.workers == 1


def test_what_a_model_is_checked_against_counts(reader: Reader, project: Path) -> None:
    reader.read()
    reader.read(TOML.replace('"models/a.onnx"', '{ path = "models/a.onnx", dims = { batch = 2 } }'))
    assert reader.workers == 2
    wrong = TOML.replace('"models/a.onnx"', '{ path = "models/a.onnx", dims = { bitch = 2 } }')
    for _ in range(2):
        with pytest.raises(BuildError, match="bitch"):
            reader.read(wrong)
    assert reader.workers == 4, "a problem is not stored"
    save(network(3), project / "models" / "a.onnx")
    reader.read()
    assert reader.workers == 5


def test_only_unknown_models_are_read(reader: Reader, project: Path) -> None:
    reader.read()
    (project / "models" / "b.onnx").write_text("text", encoding="utf-8")
    both = TOML.replace('"models/a.onnx"', '"models/a.onnx", "models/b.onnx"')
    with pytest.raises(BuildError) as raised:
        reader.read(both)
    assert [problem.key for problem in raised.value.problems] != []
    assert all("b.onnx" in str(problem) for problem in raised.value.problems)
    save(network(3), project / "models" / "b.onnx")
    assert [source.model.name for source in reader.read(both)] == ["a", "b"]


def test_external_data_counts_and_its_place_does_not(reader: Reader, project: Path) -> None:
    model = project / "models" / "a.onnx"
    own = reader.read()[0].sha256
    onnx.save(network(), model, save_as_external_data=True, location="a.data", size_threshold=0)
    first = reader.read()[0]
    assert first.facts.external_data == ("a.data",)
    assert first.sha256 != own
    data = project / "models" / "a.data"
    data.write_bytes(data.read_bytes()[:-1] + b"\x00" + b"more")
    assert reader.read()[0].sha256 != first.sha256
    workers = reader.workers
    data.unlink()
    with pytest.raises(BuildError, match=r"'a\.data' is missing"):
        reader.read()
    assert reader.workers == workers + 1


def test_from_the_cache_alone_an_unknown_model_is_an_error(reader: Reader) -> None:
    environ = {"HATCH_EPCONTEXT_FROM_CACHE": "all"}
    with pytest.raises(BuildError) as raised:
        reader.read(environ=environ)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.NOT_CACHED
    assert reader.workers == 0
    first = reader.read()
    assert [source.sha256 for source in reader.read(environ=environ)] == [first[0].sha256]


@pytest.mark.skipif(sys.platform == "win32", reason="files with holes take space there")
def test_files_that_nothing_can_need_are_not_even_hashed(reader: Reader, project: Path) -> None:
    model = project / "models" / "a.onnx"
    save_with_data(network(), model)
    reader.read()
    # Known facts are no reason to read what came in the place of the data.
    with (model.parent / "network.data").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(BuildError, match=r"the external data .* is larger than"):
        reader.read()
    with model.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(BuildError, match="cannot be larger than 2 GiB"):
        reader.read()


def test_a_model_that_is_too_large_to_embed_is_refused_before_compiling(
    reader: Reader, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = project / "models" / "a.onnx"
    save_with_data(network(), model)
    monkeypatch.setattr(sources_module, "PROTOBUF_LIMIT", model.stat().st_size)
    toml = TOML.replace("cpu", "qnn").replace(
        '"models/a.onnx"', '{ path = "models/a.onnx", dims = { batch = 1 } }'
    )
    reader.read(toml)
    with pytest.raises(BuildError, match="2 GiB, and the model has") as raised:
        reader.read(f"{toml}targets.qnn.embed = true")
    (problem,) = raised.value.problems
    assert str(problem.key) == "tool.epcontext.targets.qnn.embed"
    assert "Remove embed" in problem.advice()

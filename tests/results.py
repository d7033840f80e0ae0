"""The result of a build, without a build, for tests that need one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.files import record_file, record_files, temp_dir
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.artifact import Built, Result, Source
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.recipe import Recipe, Record, Times
from hatch_epcontext.jobs.search import Attempt, Search, Terms
from hatch_epcontext.package.bundle import bundle, modules
from hatch_epcontext.package.folder import publish
from hatch_epcontext.worker.results import (
    Context,
    Coverage,
    ModelFacts,
    Preparation,
    Validated,
    Validation,
    ValidationStatus,
)

MODULES = modules("my_app.epcontext", ())

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


@dataclass(frozen=True)
class Artifact:
    """What a job has compiled."""

    folder: Path
    record: Record


def configured(root: Path, toml: str = TOML) -> Config:
    return load(root, parse(toml), {}, {})


def resulting(config: Config, artifact: Artifact) -> Result:
    """The result in which the artifact of every job is ``artifact``."""
    facts = artifact.record.contexts[0]
    sources = tuple(
        _source(model, ModelFacts(facts.inputs, facts.outputs, ())) for model in config.models
    )
    jobs = plan(config).jobs
    validation = Validation(ValidationStatus.STRUCTURE)
    validated = {"a": Validated(validation, load=0.2, day="2026-11-23")}
    built = tuple(built_from(job, artifact, validated) for job in jobs)
    return Result(sources, built)


def install(result: Result, folder: Path) -> None:
    """Write the package of an editable install into ``folder``."""
    with temp_dir() as staging:
        package = bundle(result, staging, MODULES, folder)
        publish(package, result.sources, folder, edited=True)


def compiled(config: Config, folder: Path) -> Result:
    """The result in which every job has an artifact of its own below ``folder``.

    The shape of each input ``x`` is the configured one, or ``batch x 4``.
    """
    sources = tuple(_source(model, _facts(model)) for model in config.models)
    return Result(sources, tuple(_built(job, folder / job.folder) for job in plan(config).jobs))


def _source(model: Model, facts: ModelFacts) -> Source:
    names = (model.path.name, *model.beside)
    records = {name: record_file(model.path.parent / name) for name in names}
    return Source(model, facts, "00" * 32, records)


def _facts(model: Model) -> ModelFacts:
    own = TensorFacts("x", "float32", ("batch", 4))
    outputs = (TensorFacts("y", "float32", ("batch", 4)),)
    return ModelFacts((_input(model),), outputs, (), (own,), own_outputs=outputs)


def _input(model: Model) -> TensorFacts:
    return TensorFacts("x", "float32", model.shapes.get("x", ("batch", 4)))


def _built(job: Job, folder: Path) -> Built:
    folder.mkdir(parents=True)
    contexts = []
    for model in job.models:
        name = job.target.provider.result_file(model.name)
        (folder / name).write_text(f"{model.name} for {job.target.name}", encoding="utf-8")
        coverage = Coverage(3, 3, 1) if job.target.provider.product == "context" else None
        output = TensorFacts("y", "float32", (1, 4))
        contexts.append(Context(model.name, name, (_input(model),), (output,), coverage))
    (folder / "sidecar.bin").write_text(job.location, encoding="utf-8")
    record = Record(
        Recipe("onnxruntime"),
        tuple(Preparation("onnxruntime", 5, 4) for _ in job.models),
        tuple(contexts),
        record_files(folder),
        {"onnxruntime": "1.0"},
    )
    validated = {model.name: Validated(Validation(ValidationStatus.RAN)) for model in job.models}
    return built_from(job, Artifact(folder, record), validated)


def built_from(job: Job, artifact: Artifact, validated: Mapping[str, Validated]) -> Built:
    """The result of ``job`` whose only attempt made ``artifact``, which was ``validated``."""
    record = artifact.record
    attempt = Attempt(record.recipe, record, times=Times(0.1, 0.5), validated=validated)
    terms = Terms(comparisons={name: name for name in validated})
    search = Search(job.target.settings, terms).adding(attempt).won_by(attempt)
    return Built(job, artifact.folder, search, cached=False)

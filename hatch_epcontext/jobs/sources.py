"""The source models of a build, cut as configured: their facts and sha256, from the index or a worker.

And the files of dummy inputs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hatch_epcontext
from hatch_epcontext.cache.build import Cache, Index
from hatch_epcontext.config.genai import check_caches
from hatch_epcontext.config.settings import SYNTHETIC, Config, Model
from hatch_epcontext.errors import BuildError, Kind, ModelError, Problem, merged
from hatch_epcontext.files import FileRecord, is_portable, is_regular, record_file, too_large
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT, TensorFacts
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.plan import CACHE_FORMAT, model_settings
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.serialize import to_plain, value_sha256
from hatch_epcontext.system import writing
from hatch_epcontext.text import show_size, suggestion
from hatch_epcontext.worker.results import ModelFacts


@dataclass(frozen=True)
class _CutModel:
    """A cut model: its files, and the hex sha256 of each file of the external data of the whole model."""

    files: Mapping[str, FileRecord]
    data: Mapping[str, str]


def cut_and_read(
    config: Config,
    cache: Cache,
    workers: Workers,
    staging: Path,
    defaults: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[Source, ...]:
    """All models of ``config``, as it changes them; raises as `cut_models` and `read_sources`."""
    config = cut_models(config, cache, workers, staging, defaults)
    return read_sources(config, cache, workers, staging / "check")


def cut_models(
    config: Config,
    cache: Cache,
    workers: Workers,
    staging: Path,
    defaults: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Config:
    """``config`` with the paths of cut models, and of those with their constants in them, below ``staging``.

    ``defaults``: the inputs with default values, which become constants too, by the name of the model.
    A worker writes a model, unless ``cache`` has the result of an earlier build. Raises ModelError when a
    model cannot be cut or a constant does not fit, and RequirementError when nothing can read the model.
    """
    groups: dict[tuple[Any, ...], list[Model]] = {}
    for model in config.models:
        if model.is_changed or model.name in defaults:
            group = model.path, model.cut, value_sha256(model.constants), model.name in defaults
            groups.setdefault(group, []).append(model)
    if not groups:
        return config
    done: dict[str, Model] = {}
    for number, models in enumerate(groups.values()):
        frozen, folder = defaults.get(models[0].name, ()), staging / "cut" / str(number)
        path, content = _cut_model(models[0], cache, workers, folder, with_defaults=bool(frozen))
        for model in models:
            done[model.name] = replace(
                model, path=path, constants={}, origin=model.path, content=content, defaults=frozen
            )
    return replace(config, models=tuple(done.get(model.name, model) for model in config.models))


def _cut_model(
    model: Model, cache: Cache, workers: Workers, scratch: Path, *, with_defaults: bool
) -> tuple[Path, str]:
    """The path of ``model`` after it was cut, below ``scratch``, and its `Model.content`."""
    source, index, folder = model.path, cache.index, scratch / "model"
    change = [index.sha256(source), model.cut, model.constants, with_defaults]
    key = value_sha256([hatch_epcontext.__version__, CACHE_FORMAT, source.name, *change])
    cut = cache.get("cut", key, _CutModel, folder)
    data = {} if cut is None else {source.parent / name: sha for name, sha in cut.data.items()}
    # The external data of the whole model may have changed since it was cut.
    if cut and all(is_regular(file) and index.sha256(file) == sha for file, sha in data.items()):
        return folder / source.name, value_sha256([*change, cut.data])
    check_environment((), INSPECTION)
    shutil.rmtree(folder, ignore_errors=True)
    with writing("a cut model", scratch):
        folder.mkdir(parents=True)
    # Imported here: a build that has its models in the cache makes no requests.
    from hatch_epcontext.worker.requests import CutRequest

    request = CutRequest(model, str(folder), with_defaults)
    reply = workers.call(request, scratch / "call", location=f"{model.name}: cutting")
    # The files that were cut must be those that were hashed.
    index.sha256(source, again=True)
    sha256 = {name: index.sha256(source.parent / name) for name in reply.data}
    files = {name: record_file(folder / name) for name in reply.files}
    cache.put("cut", key, _CutModel(files, sha256), folder)
    return folder / source.name, value_sha256([*change, sha256])


def read_sources(
    config: Config, cache: Cache, workers: Workers, scratch: Path
) -> tuple[Source, ...]:
    """All models of ``config``; a worker in ``scratch`` reads those whose facts ``cache`` lacks.

    Raises BuildError with all problems of all models.
    """
    index = cache.index
    # These are not even hashed.
    if problems := [p for m in config.models for p in _too_large(m)]:
        raise ModelError(*problems)
    # The build that filled the cache has checked the model for its own targets.
    key_of = _unchecked_key if config.environment.only_from_cache else _key
    keys, known = dict[str, str](), dict[str, ModelFacts]()
    for model in config.models:
        keys[model.name] = key = key_of(model, index)
        facts = cache.get("facts", key, ModelFacts)
        if facts is not None and _is_whole(model, facts):
            known[model.name] = facts
        elif not config.environment.only_from_cache:
            # While the other models are hashed.
            workers.start_server()
    unknown = tuple(model for model in config.models if model.name not in known)
    if unknown:
        if config.environment.only_from_cache:
            raise _not_known(unknown, cache)
        # Imported here: a build that has its models in the cache makes no requests.
        from hatch_epcontext.worker.requests import CheckRequest

        checked = tuple(replace(model, targets=model.compiled_targets) for model in unknown)
        reply = workers.call(CheckRequest(checked), scratch, location="reading the models")
        for model in unknown:
            # The facts must be those of the contents that were hashed.
            index.sha256(model.path, again=True)
        known |= {model.name: facts for model, facts in zip(unknown, reply, strict=True)}
    # Of known models too: the shared cache may lack them, and here they are in use, for builds that only read
    # the cache.
    kept = {_unchecked_key(model, index): known[model.name] for model in config.models}
    kept |= {keys[model.name]: known[model.name] for model in unknown}
    for key, facts in kept.items():
        cache.put("facts", key, facts)
    problems = [p for m in config.models for p in unknown_outputs(m, known[m.name].outputs)]
    problems += (p for m in config.models for p in check_caches(m, known[m.name].inputs))
    if problems:
        # All shapes of one model have the same tolerance.
        raise ModelError(*merged(problems))
    sources = tuple(_source(model, known[model.name], index) for model in config.models)
    if problems := [problem for source in sources for problem in _not_embeddable(source)]:
        raise ModelError(*merged(problems))
    return sources


def check_unchanged(sources: Iterable[Source], hint: str | None = None) -> None:
    """Raise ModelError, with ``hint``, if a file of ``sources`` has changed since it was read."""
    # Hooks do not change what is not in the project.
    users = (source.users_files for source in sources if source.model.download is None)
    for file, recorded in (item for files in users for item in files.items()):
        if not file.is_file() or record_file(file) != recorded:
            message = "was changed or removed after it had been compiled."
            hint = hint or "Build again when nothing writes to it."
            raise ModelError(Problem(Kind.MODEL_CHANGED, str(file), message, hint))


def unknown_outputs(model: Model, outputs: Iterable[TensorFacts]) -> Iterator[Problem]:
    """Problems for outputs in the tolerance of ``model`` that are not among its ``outputs``."""
    names = [output.name for output in outputs]
    key, tolerance = model.key / "validate" / "tolerance" / "outputs", model.validate.tolerance
    for name in tolerance.outputs if tolerance else ():
        if name not in names:
            message, hint = f"the model has no output {name!r}.", suggestion(name, names)
            yield Problem.at(key / name, Kind.UNKNOWN_INPUT, message, hint)


def inputs_digest(inputs: str, index: Index) -> str:
    """What identifies the dummy inputs of a model: the contents of their files, or their name."""
    if inputs in SYNTHETIC:
        return inputs
    path = Path(inputs)
    if path.is_file():
        return index.sha256(path)
    if path.is_dir():
        files = input_files(inputs)
        return value_sha256(
            {file.relative_to(path).as_posix(): index.sha256(file) for file in files}
        )
    return inputs


def input_files(inputs: str) -> list[Path]:
    """The files of the dummy inputs of a model; empty for synthetic ones."""
    if inputs in SYNTHETIC:
        return []
    path = Path(inputs)
    if path.is_file():
        return [path]
    return [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else []


def _source(model: Model, facts: ModelFacts, index: Index) -> Source:
    """The model with its hex sha256: of its file, or of its file and all files of its external data."""
    folder = model.path.parent
    names = dict.fromkeys((model.path.name, *facts.external_data, *model.beside))
    records = {name: index.record(folder / name) for name in names}
    sha256 = records[model.path.name].sha256
    if facts.external_data:
        data = {name: records[name].sha256 for name in sorted(facts.external_data)}
        sha256 = value_sha256({"model": sha256, "data": data})
    origin = index.record(model.origin) if model.origin else None
    return Source(model, facts, sha256, records, origin)


def _is_whole(model: Model, facts: ModelFacts) -> bool:
    """Whether the external data of ``model`` is there; if not, a worker reports what is missing.

    Facts from a shared cache must name no files elsewhere: the wheel would contain them.
    """
    files = [model.path.parent / name for name in facts.external_data]
    return all(map(is_portable, facts.external_data)) and all(
        is_regular(file) and too_large(file.stat()) is None for file in files
    )


def _too_large(model: Model) -> Iterator[Problem]:
    name, size = model.path.name, model.path.stat().st_size
    if size > PROTOBUF_LIMIT:
        message = f"{name} has {show_size(size)}, but an ONNX file cannot be larger than 2 GiB."
        yield Problem.at(model.key, Kind.INVALID_MODEL, message)


def _not_embeddable(source: Source) -> Iterator[Problem]:
    for target in source.model.targets:
        if target.settings.embed and source.size > PROTOBUF_LIMIT:
            message = (
                "puts the compiled blob into an ONNX file, which cannot be larger than 2 GiB, and the "
                f"model has {show_size(source.size)}."
            )
            hint = "Remove embed: the blob is then a file beside the context model."
            yield Problem.at(target.key_of("embed"), Kind.TOO_LARGE, message, hint)


def _not_known(models: Iterable[Model], cache: Cache) -> BuildError:
    message = (
        "HATCH_EPCONTEXT_FROM_CACHE is all, and the cache lacks this model with these settings."
    )
    message += cache.trouble
    hint = "Build it on a machine that can compile it, with the same cache."
    return BuildError(*(Problem.at(m.key, Kind.NOT_CACHED, message, hint) for m in models))


def _key(model: Model, index: Index) -> str:
    """What identifies the facts of ``model``: its contents, and the keys that it is checked against."""
    targets = [
        (
            (target.settings.provider, target.settings.ep, target.settings.static_shapes),
            (target.settings.compile_with, to_plain(target.profiles)),
            None if target.from_cache else target.min_coverage,
        )
        for target in model.compiled_targets
        if target.profiles or target.provider.static_shapes or target.provider.product == "context"
    ]
    inputs, unchecked = model.validate.inputs, _unchecked_key(model, index)
    if not targets and inputs in SYNTHETIC:
        return unchecked
    return value_sha256([unchecked, inputs_digest(inputs, index), targets])


def _unchecked_key(model: Model, index: Index) -> str:
    """What identifies the facts of ``model`` whatever it is checked against."""
    return value_sha256(
        {
            "version": [hatch_epcontext.__version__, CACHE_FORMAT],
            "sha256": index.sha256(model.path),
            "model": model_settings(model),
            "states": dict(model.validate.states),
        }
    )

"""The source models of a build: their facts and their sha256, from the index or from a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hatch_epcontext
from hatch_epcontext.build.artifact import Source
from hatch_epcontext.build.fingerprint import FORMAT, value_sha256
from hatch_epcontext.build.index import Index
from hatch_epcontext.build.plan import source_spec
from hatch_epcontext.build.validation import inputs_digest
from hatch_epcontext.config.settings import Config, Model, Target
from hatch_epcontext.errors import BuildError, Key, Kind, Problem
from hatch_epcontext.files import FileRecord
from hatch_epcontext.ipc.facts import ModelFacts
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.providers import Profile
from hatch_epcontext.serialize import to_plain

if TYPE_CHECKING:
    from hatch_epcontext.ipc.protocol import CheckRequest


_Profiles = tuple[Key, tuple[Profile, ...], bool]
"""The place of a target's optimization profiles, the profiles, and whether the target fixes shapes."""


def read_sources(
    config: Config, index: Index, workers: Workers, scratch: Path
) -> tuple[Source, ...]:
    """All models of ``config``; a worker in ``scratch`` reads those that ``index`` does not know.

    Raises BuildError with all problems of all models.
    """
    checks = _Checks.of(config)
    keys = {model.name: checks.key(model, index) for model in config.models}
    known: dict[str, ModelFacts] = {}
    for model in config.models:
        facts = index.facts(keys[model.name], ModelFacts)
        if facts is not None and _is_whole(model, facts):
            known[model.name] = facts
    unknown = tuple(model for model in config.models if model.name not in known)
    if unknown:
        if config.only_from_cache:
            raise BuildError(*map(_not_known, unknown))
        reply = workers.call(checks.request(unknown), scratch, location="reading the models")
        for model, facts in zip(unknown, reply.models, strict=True):
            index.store_facts(keys[model.name], facts)
            known[model.name] = facts
    return tuple(_source(model, known[model.name], index) for model in config.models)


def _source(model: Model, facts: ModelFacts, index: Index) -> Source:
    """The model with its hex sha256: of its file, or of its file and all files of its external data."""
    folder = model.path.parent
    records = {
        name: FileRecord((folder / name).stat().st_size, index.sha256(folder / name))
        for name in (model.path.name, *facts.external_data)
    }
    sha256 = records[model.path.name].sha256
    if facts.external_data:
        data = {name: records[name].sha256 for name in sorted(facts.external_data)}
        sha256 = value_sha256({"model": sha256, "data": data})
    return Source(model, facts, sha256, records)


def _is_whole(model: Model, facts: ModelFacts) -> bool:
    """Whether the external data of ``model`` is there; a worker says what is missing."""
    return all((model.path.parent / name).is_file() for name in facts.external_data)


def _not_known(model: Model) -> Problem:
    return Problem.at(
        model.key,
        Kind.NOT_CACHED,
        "HATCH_EPCONTEXT_FROM_CACHE is all, and the cache does not know this model with these settings.",
        "Build it where it can be built, with the same cache.",
    )


@dataclass(frozen=True)
class _Checks:
    """What the models are checked against, by their names; see `CheckRequest`."""

    static: dict[str, str] = field(default_factory=dict)
    left_open: dict[str, str] = field(default_factory=dict)
    profiles: dict[str, list[_Profiles]] = field(default_factory=dict)

    @staticmethod
    def of(config: Config) -> _Checks:
        made = _Checks()
        for model, target in _pairs(config):
            static_shapes = target.settings.static_shapes
            if target.provider.static_shapes:
                names = made.static if static_shapes else made.left_open
                names[model.name] = target.provider.ep
            if target.profiles:
                key = target.key / "profiles"
                its = made.profiles.setdefault(model.name, [])
                its.append((key, target.profiles, static_shapes))
        return made

    def request(self, models: tuple[Model, ...]) -> CheckRequest:
        # Only now: a build that knows its models needs no requests.
        from hatch_epcontext.ipc.protocol import CheckRequest, ModelProfiles

        profiles = (
            ModelProfiles(model.name, *each)
            for model in models
            for each in self.profiles.get(model.name, ())
        )
        specs = tuple(map(source_spec, models))
        return CheckRequest(specs, self.static, tuple(profiles), self.left_open)

    def key(self, model: Model, index: Index) -> str:
        """What identifies the facts of ``model``: its contents and all that it is checked against."""
        spec = to_plain(source_spec(model))
        place = ("path", "key", "listed")
        profiles = [(its, static) for _, its, static in self.profiles.get(model.name, ())]
        return value_sha256(
            {
                "version": [hatch_epcontext.__version__, FORMAT],
                "sha256": index.sha256(model.path),
                "model": {name: value for name, value in spec.items() if name not in place},
                "inputs": inputs_digest(model.validate.inputs, index),
                "static": [self.static.get(model.name), self.left_open.get(model.name)],
                "profiles": to_plain(profiles),
            }
        )


def _pairs(config: Config) -> Iterator[tuple[Model, Target]]:
    return ((model, target) for model in config.models for target in model.targets)

"""Config -> Plan: the jobs, what they need installed, and where each result goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from hatch_epcontext.config import Config, Model, Target
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.protocol import ModelSpec, TargetSpec
from hatch_epcontext.requirements import requirements


@dataclass(frozen=True)
class Job:
    """Models that are compiled together for one target; more than one only when they share weights."""

    models: tuple[Model, ...]
    target: Target
    group: str | None = None
    """The name of the weight-sharing group that the models are."""

    @property
    def name(self) -> str:
        return self.group or self.models[0].name

    @property
    def where(self) -> str:
        members = f" ({' + '.join(model.name for model in self.models)})" if self.group else ""
        return f"{self.name}{members} -> {self.target.name}"

    @property
    def alone(self) -> tuple[Job, ...]:
        """A job for each of the models, as if it shared nothing."""
        return tuple(Job((model,), self.target) for model in self.models)

    @property
    def folder(self) -> str:
        """Where the artifact goes, below the output folder."""
        return f"{self.name}/{self.target.name}"


@dataclass(frozen=True)
class Plan:
    """All jobs of a build, and the distributions that they need, as requirement strings."""

    config: Config
    jobs: tuple[Job, ...]
    requirements: tuple[str, ...]


def plan(config: Config) -> Plan:
    """The plan for ``config``; raises ConfigError when its targets cannot be built in one environment."""
    return Plan(config, _jobs(config), requirements(config.targets))


def _jobs(config: Config) -> tuple[Job, ...]:
    jobs: list[Job] = []
    problems: list[Problem] = []
    for model in config.models:
        for target in model.targets:
            members = _members(config, model, target)
            if len(members) < 2:
                jobs.append(Job((model,), target))
            elif members[0][0] is model:
                problems += _ungroupable(members)
                jobs.append(Job(tuple(m for m, _ in members), target, model.share_weights))
    if problems:
        raise ConfigError(*problems)
    return tuple(jobs)


def _members(config: Config, model: Model, target: Target) -> list[tuple[Model, Target]]:
    """The models of a model's group, with their forms of ``target``; only some EPs share weights."""
    if model.share_weights is None or not target.provider.shares_weights:
        return []
    return [
        (other, its)
        for other in config.models
        if other.share_weights == model.share_weights
        for its in other.targets
        if its.name == target.name
    ]


def _ungroupable(members: list[tuple[Model, Target]]) -> Iterator[Problem]:
    (_, first), *others = members
    for model, target in members:
        if target.embed:
            yield Problem(
                f"{model.key}.share-weights",
                f"shares one sidecar on the target {target.name}, and embed = true would put it inside "
                "of each context model.",
                "Leave embed out, or the group.",
            )
    for model, target in others:
        if dataclasses.replace(target, key=first.key) != first:
            yield Problem(
                f"{model.key}.share-weights",
                f"the models of a group are compiled together, and this one has other settings for the "
                f"target {target.name} than {members[0][0].name}.",
                "Move what they narrow to the target, or give both the same.",
            )


def model_spec(model: Model) -> ModelSpec:
    """What a worker is told of a model."""
    return ModelSpec(
        model.name,
        str(model.path),
        model.key,
        model.dims,
        model.shapes,
        model.constants,
        model.inputs,
    )


def model_spec_of(model: Model, target: Target) -> ModelSpec:
    """What a worker that runs ``model`` on ``target`` is told of it.

    Where the target's profiles leave shapes open, the best ones of the first profile are fed.
    """
    fed = {name: tuple(shapes["opt"]) for p in target.profiles[:1] for name, shapes in p.items()}
    return dataclasses.replace(model_spec(model), shapes={**fed, **model.shapes})


def target_spec(target: Target) -> TargetSpec:
    """What a worker is told of a target."""
    return TargetSpec(
        name=target.name,
        provider=target.provider.name,
        ep=target.provider.ep,
        plugin=target.provider.plugin,
        provider_options=target.provider_options,
        session_options=target.session_options,
        load_options=target.load_options,
        device=target.device,
        device_filter=target.device_filter,
        policy=target.policy,
        virtual_devices=target.virtual_devices,
        optimization=target.optimization,
        embed=target.embed,
        in_memory=target.in_memory,
        external_initializers=target.external_initializers,
    )

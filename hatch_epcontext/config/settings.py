"""A checked configuration, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hatch_epcontext.environment import Editable, Validate
from hatch_epcontext.providers import Device, Profile, Provider, Tolerance
from hatch_epcontext.tables import Fallback, Optimization, Policy, ToleranceTable


@dataclass(frozen=True)
class Target:
    """A named place a model is compiled for, with what the model narrowed and the defaults filled in.

    ``key`` is where the optimization profiles stand in the configuration; they are also in
    ``provider_options``, as the EP wants them. ``external_initializers``: bytes from which what is left
    outside of the contexts goes into a file of its own, or None. With ``from_cache`` nothing is compiled
    in this build.
    """

    name: str
    key: str
    provider: Provider
    provider_options: Mapping[str, str]
    session_options: Mapping[str, str]
    load_options: Mapping[str, str]
    device: Device
    device_filter: Mapping[str, str]
    policy: Policy | None
    virtual_devices: bool
    profiles: tuple[Profile, ...]
    platforms: tuple[str, ...]
    requirements: tuple[str, ...] | None
    optimization: Optimization
    embed: bool
    in_memory: bool
    external_initializers: int | None
    min_coverage: float
    from_cache: bool

    @property
    def needs_ep(self) -> bool:
        """Whether the EP itself has to be there to build: basic optimizations are the same for all."""
        return self.provider.product == "context" or self.optimization not in ("none", "basic")


@dataclass(frozen=True)
class Model:
    """A source model, with the targets that it is built for in this build.

    ``path`` is absolute, and so is ``inputs`` unless they are made up; ``key`` is where the model
    stands in the configuration. ``tolerance`` is what the configuration says, or None for what the
    provider says.
    """

    name: str
    path: Path
    key: str
    targets: tuple[Target, ...]
    share_weights: str | None
    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, Any]
    inputs: str
    tolerance: ToleranceTable | Literal[False] | None
    validate: Validate

    def tolerance_for(self, provider: Provider) -> Tolerance | None:
        """How far outputs on ``provider`` may be from the CPU EP's; None for no comparison."""
        if self.tolerance is False:
            return None
        given = dataclasses.asdict(self.tolerance) if self.tolerance else {}
        return dataclasses.replace(
            provider.tolerance, **{k: v for k, v in given.items() if v is not None}
        )


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    ``output`` is None for ``<import package>/epcontext``; ``report`` is where the page about the build goes.
    """

    root: Path
    models: tuple[Model, ...]
    output: PurePosixPath | None
    jobs: int
    timeout: float
    fallback: Fallback
    editable: Editable
    wheel_tag: str
    max_size: int | None
    cache_dir: Path | None
    use_cache: bool
    report: Path | None
    overrides: tuple[str, ...]

    @property
    def targets(self) -> tuple[Target, ...]:
        """One target of each name that some model is built for, in order."""
        return tuple({t.name: t for model in self.models for t in model.targets}.values())

"""The vocabulary in which knowledge about execution providers (EPs) is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hatch_epcontext.providers.option import Option

Product = Literal["context", "optimized"]
Device = Literal["npu", "gpu", "cpu", "any"]


@dataclass(frozen=True)
class Plugin:
    """An EP that comes as a library of its own, in a package with ``get_library_path()``.

    ``path`` is that of the library where there is no such package, and ``module`` is empty then.
    """

    module: str
    package: str
    registration_name: str
    path: str = ""


@dataclass(frozen=True)
class Tolerance:
    """How far a target's outputs may be from those of the CPU EP.

    An output passes when ``|out - ref| <= atol * max(1, max|ref|) + rtol * |ref|`` holds everywhere
    and the cosine similarity of the flattened output with its reference is at least ``cosine``. That
    is not asked of an output whose error is, on the average, below a hundredth of the first term.
    """

    rtol: float
    atol: float
    cosine: float


Profile = Mapping[str, Mapping[str, Sequence[int]]]
"""For each input its least, best and greatest shape, under ``min``, ``opt`` and ``max``."""


@dataclass(frozen=True)
class ProfileOptions:
    """The options in which an EP wants its optimization profiles.

    ``several`` is the switch for more than one profile, if there is one.
    """

    min: str
    opt: str
    max: str
    several: str = ""

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.min, self.opt, self.max})

    def render(self, profiles: Sequence[Profile]) -> dict[str, str]:
        """The options for ``profiles``: ``x:1x3,y:1x4,x:8x3,y:8x4`` for two profiles of two inputs."""
        bounds = ((self.min, "min"), (self.opt, "opt"), (self.max, "max"))
        rendered = {
            option: ",".join(
                f"{name}:{'x'.join(map(str, shapes[bound]))}"
                for profile in profiles
                for name, shapes in profile.items()
            )
            for option, bound in bounds
        }
        return {**rendered, self.several: "1"} if self.several and len(profiles) > 1 else rendered


def _nothing_wrong(options: Mapping[str, str]) -> dict[str, str]:
    return {}


def _nothing_told(compatibility: str) -> dict[str, str]:
    return {}


def _nothing_to_compare(compatibility: str, ep_sdk_version: str, options: Mapping[str, str]) -> str:
    return ""


def _everywhere(system: str, machine: str) -> bool:
    return True


@dataclass(frozen=True)
class Provider:
    """What the package knows of one execution provider.

    A provider is added by adding a module to this package that holds one, named ``PROVIDER``.
    """

    name: str
    """As it is written in ``provider = "..."``."""

    ep: str
    """ONNX Runtime's name of the EP."""

    title: str
    """What it is, in a few words, for the documentation."""

    product: Product
    """``"context"``: models become EP-context models. ``"optimized"``: the EP compiles nothing
    ahead of time, and what can be shipped is ONNX Runtime's optimized graph."""

    flavours: tuple[str, ...]
    """ONNX Runtime distributions that the EP runs on, best first. They share one import package, so
    an environment can hold only one of them."""

    devices: tuple[Device, ...]
    """What the EP runs on; the first is what the loader looks for by default."""

    tolerance: Tolerance
    """The default, which suits the precision in which the EP computes."""

    verified: str
    """Where what it makes was compiled, loaded and run, or up to which point; for the documentation."""

    hardware: str = "not verified on hardware"
    needs: str = ""
    """The hardware and the driver without which it offers no device."""

    runtime_cache: str = ""
    """The option for loading that names a folder in which the EP keeps what it compiles when it opens an
    artifact, if it has one."""

    example: str = ""
    """A line of TOML for a new configuration: the options without which little can be compiled."""

    notes: tuple[str, ...] = ()
    """What it cannot do and what one has to know, for the documentation."""

    sources: tuple[str, ...] = ()
    """The documents from which the options are."""

    aliases: tuple[str, ...] = ()
    """Other spellings of its name; those of ``ep`` need not be listed."""

    requirements: tuple[str, ...] = ()
    """What to install beside ONNX Runtime."""

    rivals: tuple[frozenset[str], ...] = ()
    """Sets of distributions that overwrite one another's files."""

    python: tuple[int, int] = (3, 10)
    """The oldest Python for which ``requirements`` have wheels."""

    systems: tuple[str, ...] = ()
    """The ``sys.platform`` for which ``requirements`` have wheels; empty for all."""

    plugin: Plugin | None = None
    """None for an EP that is a part of ONNX Runtime's own distribution."""

    needs_library: bool = False
    """Whether the configuration has to say where the EP's library is."""

    virtual_devices: bool = False
    """Whether the EP offers devices that are not there, to compile for them."""

    cross_compiles: bool = False
    """Whether it compiles for its device on any other that it offers, told by its options."""

    options: Mapping[str, Option] = field(default_factory=dict)
    any_options: bool = False
    """Whether the options are not known: of an EP that is not known either."""

    retired: Mapping[str, str] = field(default_factory=dict)
    """Options of older releases that the EP ignores, each with what takes its place."""

    managed: Mapping[str, str] = field(default_factory=dict)
    """Options that are not the user's to set, each with what to use instead."""

    defaults: Mapping[str, str] = field(default_factory=dict)
    """Provider options that are filled in; a default gives way to an option that excludes it."""

    exclusive: tuple[frozenset[str], ...] = ()
    """Sets of options of which at most one may be given."""

    shares_weights: bool = False
    """Whether models that are compiled in one process can share one sidecar."""

    loads_shared: bool = False
    """Whether the contexts of such models can be opened where they are compiled."""

    embeds_one: bool = False
    """Whether it loads an embedded context only where that is the model's only one."""

    profiles: ProfileOptions | None = None
    """How it wants optimization profiles, if it has them."""

    static_shapes: bool = False
    """Whether the EP leaves nodes with open dimensions to the CPU."""

    own_context_options: Callable[[str, bool], dict[str, str]] | None = None
    """(path of the context model, embed) -> provider options with which a plain session writes it: for
    EPs that do so themselves, and that ModelCompiler does not serve."""

    contradictions: Callable[[Mapping[str, str]], dict[str, str]] = _nothing_wrong
    """What is wrong between options, each as option -> message."""

    compiled_for: Callable[[str], dict[str, str]] = _nothing_told
    """What a compatibility string says, in the words of the options; empty if its form is unknown."""

    disagreement: Callable[[str, str, Mapping[str, str]], str] = _nothing_to_compare
    """How a compatibility string and ``ep_sdk_version`` disagree with the options that were asked for;
    "" if they do not."""

    runs_on: Callable[[str, str], bool] = _everywhere
    """Whether a context that was compiled for any of its chips can be run on a host of this
    ``sys.platform`` and ``platform.machine()``, if only by simulation."""

    def complete(self, options: Mapping[str, str]) -> dict[str, str]:
        """``options`` with the defaults filled in."""
        excluded = {
            name
            for group in self.exclusive
            if not group.isdisjoint(options)
            for name in group - options.keys()
        }
        return {**{k: v for k, v in self.defaults.items() if k not in excluded}, **options}

    def loading(self, options: Mapping[str, str]) -> dict[str, str]:
        """Those of ``options`` that a session needs when it opens the artifact."""
        return {
            name: value
            for name, value in options.items()
            if name not in self.options or self.options[name].scope != "compile"
        }

    def disagreements(
        self, compatibility: str, ep_sdk_versions: Iterable[str], asked: Mapping[str, str]
    ) -> Iterator[str]:
        """How the contexts of a model, by their versions, disagree with what was asked for."""
        # Nodes that only refer to another's context need not say what made it.
        for version in dict.fromkeys(filter(None, ep_sdk_versions)) or ("",):
            if wrong := self.disagreement(compatibility, version, asked):
                yield wrong

    def result_file(self, model: str) -> str:
        """The name of the file that ``model`` becomes."""
        return f"{model}_{'ctx' if self.product == 'context' else 'optimized'}.onnx"

    def unavailable(self, python: tuple[int, int], system: str) -> str:
        """Why ``requirements`` cannot be installed on a Python and a ``sys.platform``; "" if they can."""
        if python < self.python:
            wanted, found = (".".join(map(str, version)) for version in (self.python, python))
            return f"needs Python {wanted} or newer, and this is {found}"
        if self.systems and system not in self.systems:
            return f"has no packages for this system, {system}"
        return ""

    def answers_to(self, name: str) -> bool:
        """Whether ``name`` is one of its names, in any case and with or without "ExecutionProvider"."""
        own = {_plain(each) for each in (self.name, self.ep, *self.aliases)} - {""}
        return _plain(name) in own


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).casefold().removesuffix("executionprovider")

"""The types that describe execution providers (EPs)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any, Literal

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Cost, Limits
from hatch_epcontext.graph.number_format import NumberFormat, RewriteName
from hatch_epcontext.providers.option import Option

# The loader is copied into other packages and can import nothing of this one, so it declares `Device`.
from hatch_epcontext.shipped import Device
from hatch_epcontext.text import pairs

Product = Literal["context", "optimized"]

HEADER = 64
"""The bytes of a blob that `Provider.wrong_blobs` gets: those of an engine's header."""


IN_PROFILES = "write the shapes into profiles"
"""Why an option for the shapes of optimization profiles is reserved."""

OF_THE_APP = "an address in memory, which only the app can give: load(..., provider_options={...})"
"""Why an option for an address is reserved."""

NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
"""The command of NVIDIA's driver that lists its GPUs, for `Provider.device_query`."""

KEEPS_NO_FILES = "it writes files beside the artifact, and a build keeps none of them"
"""Why an option for debugging is reserved."""


@dataclass(frozen=True)
class Plugin:
    """An EP in a library of its own, which a package with ``get_library_path()`` contains.

    ``package`` is the distribution to install, ``module`` its import package. For a library without
    such a package ``path`` is its path, and ``module`` is empty.
    """

    module: str
    package: str
    registration_name: str
    path: str = ""


@dataclass(frozen=True)
class Tolerance:
    """How far outputs may differ from the CPU EP's.

    ``snr``: the smallest signal-to-noise ratio in decibels; slices of the output may be 7 to 10 dB worse.
    ``cosine``: the smallest cosine similarity. If ``atol`` or ``rtol`` is given, ``|out - ref| <= atol + rtol
    * |ref|`` must hold everywhere. ``unit``: the floor of the signal in each value of an output between -1
    and 1, large for EPs that compute a Sigmoid from a table. ``outputs``: limits of single outputs, by the
    names of the output and of the limit. ``is_fixed``: whether ``snr`` or ``cosine`` is the user's choice,
    which the noise of a quantized source does not relax.
    """

    snr: float
    cosine: float
    atol: float | None = None
    rtol: float | None = None
    unit: float = 1e-3
    outputs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    is_fixed: bool = False

    def of(self, output: str) -> Tolerance:
        """The tolerance of ``output``."""
        own: Mapping[str, Any] = self.outputs.get(output, {})
        return replace(self, **own, outputs={}) if self.outputs else self


QUANTIZED = Tolerance(snr=15, cosine=0.98)
"""How far outputs may differ if only one of the source and the compiled model is quantized."""


Profile = Mapping[str, Mapping[str, Sequence[int]]]
"""For each input its smallest, best and largest shape, under ``min``, ``opt`` and ``max``."""


@dataclass(frozen=True)
class ProfileOptions:
    """An EP's options for optimization profiles, whose names begin with ``prefix``.

    ``several`` is the option that allows more than one profile, if the EP has one.
    """

    prefix: str
    several: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The options for the smallest, the best and the largest shapes."""
        return tuple(f"{self.prefix}_{bound}_shapes" for bound in ("min", "opt", "max"))

    def render(self, profiles: Sequence[Profile]) -> dict[str, str]:
        """The options for ``profiles``: ``x:1x3,y:1x4,x:8x3,y:8x4`` for two profiles of two inputs."""
        inputs = [item for profile in profiles for item in profile.items()]
        rendered = {
            option: ",".join(
                f"{name}:{'x'.join(map(str, shapes[bound]))}" for name, shapes in inputs
            )
            for option, bound in zip(self.names, ("min", "opt", "max"), strict=True)
        }
        return {**rendered, self.several: "1"} if self.several and len(profiles) > 1 else rendered


@dataclass(frozen=True)
class MoreCoverage:
    """Provider ``options`` with which an EP compiles ``operators`` that it leaves to the CPU by default."""

    operators: frozenset[str]
    options: Mapping[str, str]


@dataclass(frozen=True)
class Chip:
    """A chip that an EP compiles for.

    ``facts``: what contexts for it are compiled for, as `Provider.compiled_for` says it. ``source``: where
    they are published; empty for a bare number. ``compiled``: the small models that were compiled for it.
    """

    facts: Mapping[str, str]
    source: str = ""
    compiled: str = ""


@dataclass(frozen=True)
class CompilerLibrary:
    """A vendor's library that compiles what an EP runs, on machines without the EP's device.

    ``module``: its Python module. ``compiler``: the worker's module that calls it. ``capabilities``: the
    compute capabilities of the GPUs that it compiles for. ``options``: the EP's options that it has; the EP's
    others for compiling are errors. ``ep_versions``: the start of the versions of the EP's package that
    contain a release of the library, by the start of the library's version. Only they run what it compiles.
    ``plugins``: the operators, of the domain com.microsoft, for which it needs the plugins in the EP's
    package, which ``plugin_requirements`` name.
    """

    module: str
    compiler: str
    requirements: tuple[str, ...]
    capabilities: tuple[str, ...]
    options: frozenset[str]
    ep_versions: Mapping[str, str]
    plugins: frozenset[str]
    plugin_requirements: tuple[str, ...]


class Provider:
    """Facts about one execution provider, and what only it can say.

    To add one, add a module to this package with a subclass, and an instance of that named ``PROVIDER``. It
    sets the attributes that have no value here, and what is different from the others.
    """

    # Identity

    name: str
    """The name in ``provider = "..."``."""

    ep: str
    """ONNX Runtime's name of the EP."""

    product: Product
    """``"context"``: models become EP-context models. ``"optimized"``: the EP compiles nothing
    ahead of time, so ONNX Runtime's optimized graph is shipped."""

    # Packages

    distributions: tuple[str, ...]
    """ONNX Runtime distributions that the EP works with, best first. They share one import package,
    so an environment can contain only one of them."""

    requirements: tuple[str, ...] = ()
    """What to install in addition to ONNX Runtime."""

    conflicts: tuple[frozenset[str], ...] = ()
    """Sets of distributions that contain the same files, so that only one can be installed."""

    python: tuple[int, int] = (3, 10)
    """The oldest Python for which ``requirements`` have wheels."""

    systems: tuple[str, ...] = ()
    """The values of ``sys.platform`` for which ``requirements`` have wheels; empty for all."""

    plugin: Plugin | None = None
    """None for an EP that is part of ONNX Runtime's own distribution."""

    integer_bits: int = 64
    """The bits of its widest integers: it computes those of larger dtypes with fewer."""

    needs_library: bool = False
    """Whether it stands for any EP: the configuration has to name the EP's library, and its options are not
    checked."""

    compiler_library: CompilerLibrary | None = None
    """The vendor's own compiler, which a target can use instead of the EP."""

    by_library: bool = False
    """Whether the target uses it: the EP is only needed to run what was compiled."""

    # Devices

    devices: tuple[Device, ...]
    """The kinds of devices that the EP runs on. The first is the default of ``device``."""

    cross_compiles: tuple[Device, ...] = ()
    """The kinds of devices for which it compiles on any device that it offers, because its options name the
    chip."""

    simulator: tuple[str, ...] = ()
    """The libraries in the package of ``plugin`` with which a build machine simulates the device, on all
    cores. They are slow to load, and forks share them."""

    simulator_speed: Cost = Cost()
    """About how many nodes, multiply-adds or values of a model it simulates in a second; none without a
    simulator."""

    name_fact: str = "Description"
    """The fact of a device that is the chip's name; by default the one that ONNX Runtime adds on Windows."""

    driver_fact: str = ""
    """The fact of a device that is its driver's version, if the EP has one."""

    device_query: tuple[str, ...] = ()
    """The driver's command that prints the name and the driver's version of each device, with a comma."""

    exclusive_device: bool = False
    """Whether concurrent steps disturb each other on its device: they measure kernels to choose the fastest,
    or need its whole memory."""

    # Compiling

    options: Mapping[str, Option] = MappingProxyType({})

    chips: Mapping[str, Chip] = MappingProxyType({})
    """The values of ``chip``: names, and numbers without a source. Facts that are options become options."""

    chip_options: frozenset[str] = frozenset()
    """The options that say which chip is compiled for: without them it is that of the device."""

    reserved: Mapping[str, str] = MappingProxyType({})
    """Options that a configuration cannot set, each with the reason or with what to use instead."""

    profiles: ProfileOptions | None = None
    """The options for optimization profiles, if the EP has profiles."""

    static_shapes: bool = False
    """Whether the EP leaves nodes with open dimensions to the CPU."""

    open_shapes_on: tuple[Device, ...] = ()
    """The kinds of devices for which shapes stay open by default."""

    limits: Limits | None = None
    """The nodes that the EP cannot compile; None if unknown."""

    operators: frozenset[str] | None = None
    """The only operators that it takes, where it compiles only on the user's machine: with ONNX Runtime's
    domain before those of `com.microsoft`. None where the build sees what is compiled, or if unknown."""

    lacks_dtypes: frozenset[str] = frozenset()
    """NumPy's names of types that the EP supports only inside quantized nodes, or not at all."""

    max_rank: int | None = None
    """The largest rank of a tensor that the EP supports; None if unknown."""

    rewrites: tuple[RewriteName, ...] = ()
    """The rewrites that avoid faults of the EP in any number format."""

    more_coverage: MoreCoverage | None = None
    """Options that are tried where the EP leaves nodes to the CPU, unless the configuration sets them."""

    waived: frozenset[str] = frozenset()
    """Operators that it leaves to the CPU on purpose, and which do not count against ``min-coverage``."""

    tolerance: Tolerance
    """The default tolerance, for the precision in which the EP computes."""

    computes_float16: bool = True
    """Whether it has kernels for float16; ONNX Runtime inserts casts to float32 for an EP without them."""

    quantized_activation: Literal["uint8", "uint16"] = "uint16"
    """The integers to which activations are quantized by default."""

    shares_weights: bool = False
    """Whether models that are compiled in one process can share a sidecar."""

    loads_shared: bool = False
    """Whether contexts that share a sidecar can be opened on the machine that compiled them."""

    embeds_one: bool = False
    """Whether it loads an embedded context only if that is the model's only context."""

    several_chips: str | None = None
    """The attribute of EPContext nodes that is 1 where the context is for several chips. Such contexts
    cannot be opened on the machine that compiled them."""

    # In apps

    genai_name: str = ""
    """The name by which onnxruntime-genai runs the EP; empty if it does not, and for the CPU's."""

    genai_plain: bool = False
    """Whether it runs the plain folder of a language model, for which nothing is compiled."""

    runtime_cache: str | None = None
    """The load option for the folder in which the EP caches what it compiles while it opens an
    artifact, if it has one."""

    cache_key: str | None = None
    """The property of a model by which the EP names what it caches of it, if it reads one: up to 63 letters
    and digits."""

    driver_files: tuple[str, ...] = ()
    """The files in which a system names the chip or the driver, where it has them: see ``_recompile.py``."""

    needs_code_page: bool = False
    """Whether on Windows it crashes if a sidecar's path has letters that the system's code page lacks."""

    compares: bool = False
    """Whether the loader asks the EP if it can run a context with a compatibility string."""

    # Documentation

    title: str
    """A short description, such as ``"NVIDIA GPUs through TensorRT"``."""

    needs: str | None = None
    """The hardware and the driver that it needs to offer a device."""

    verified: str
    """How far compiling, loading and running was tested, and where."""

    hardware: str = "not verified on hardware"
    """How far it was tested on the hardware itself."""

    example: str | None = None
    """A line of TOML for a new configuration that names a chip, or a comment about it."""

    notes: tuple[str, ...] = ()
    """Limits and advice."""

    sources: tuple[str, ...] = ()
    """The documents that list the options."""

    def number_format(self, device: Device, options: Mapping[str, str]) -> NumberFormat | None:
        """The format to which it rounds floats; None if it computes in float32, or if that is unknown."""
        return None

    def seconds_of_run(self, cost: Cost) -> float:
        """About how long the simulator runs a model of this ``cost``; 0 without one."""
        return cost.seconds_at(self.simulator_speed)

    def implied(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        """The options that follow from the ``device`` and from ``options``, which win over them."""
        return {}

    def contradictions(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        """A message for each option that contradicts another one, or the device."""
        return {}

    def missing_chip(self, options: Mapping[str, str]) -> str | None:
        """A warning if ``options`` are for no chip, and the EP compiles for one."""
        return None

    def own_context_options(self, path: str, embed: bool) -> dict[str, str]:
        """The options with which a plain session writes the context model ``path``.

        For EPs that write context models themselves; empty for those that ModelCompiler supports.
        """
        return {}

    def reasons(self, log: str) -> dict[str, str] | None:
        """The reason for each node that the EP leaves to the CPU, by the node's name, from its whole log.

        None for an EP that logs no reasons.
        """
        return None

    def error_in_words(self, message: str) -> str | None:
        """What a compiler's error means for the model, as a sentence; None for an unknown error."""
        return None

    def compiled_for(self, compatibility: str) -> dict[str, str]:
        """What a context with this compatibility string was compiled for, by name; empty if it is unknown.

        Options have values in the EP's spelling: ``"60,57"`` for two chips.
        """
        return {}

    def disagreement(
        self, compatibility: str, ep_sdk_version: str, options: Mapping[str, str]
    ) -> str | None:
        """How a context disagrees with ``options``, or the first two with each other; None if all agree."""
        return None

    def wrong_blobs(self, compatibility: str, blobs: Sequence[tuple[str, int]]) -> str | None:
        """What is wrong with the blobs of a model, as a sentence without its period.

        ``blobs``: the first `HEADER` bytes of each in hexadecimal, and its size in bytes. None if nothing is
        wrong, or if their format is unknown.
        """
        return None

    def runs_on(self, system: str, machine: str) -> bool:
        """Whether a machine can run, or simulate, a context for any of the EP's chips.

        ``system`` is its `sys.platform`, ``machine`` its `platform.machine`.
        """
        return True

    def reads(self, source: str) -> bool:
        """Whether the EP opens EPContext nodes with this ``source``."""
        return source == self.ep

    def changed(self, **facts: Any) -> Provider:
        """A copy with other ``facts``."""
        provider = copy.copy(self)
        vars(provider).update(facts)
        return provider

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def has_coverage(self) -> bool:
        """Whether a build knows which nodes the EP leaves to the CPU."""
        return self.product == "context" or self.operators is not None

    def leaves_shapes_open(self, device: Device) -> bool:
        """Whether shapes stay open by default when models are compiled for ``device``."""
        if device == "any":
            return set(self.devices) <= set(self.open_shapes_on)
        return device in self.open_shapes_on

    def complete(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        """``options`` with those that follow from the ``device`` and from them."""
        return {**self.implied(device, options), **options}

    def facts_of(self, chips: Iterable[str]) -> dict[str, str]:
        """What a context for all of ``chips`` is compiled for; unknown names count for nothing."""
        known = [self.chips[name].facts for name in chips if name in self.chips]
        names = dict.fromkeys(name for facts in known for name in facts)
        return {name: ",".join(facts[name] for facts in known if name in facts) for name in names}

    def per_chip(self, facts: Mapping[str, str]) -> tuple[dict[str, str], ...]:
        """Those of ``facts`` that are about chips, for each of their chips: at least one."""
        names = dict.fromkeys(name for chip in self.chips.values() for name in chip.facts)
        lists = {name: re.split(", ?", facts[name]) for name in names if name in facts}
        # A fact with one value applies to all chips.
        return tuple(
            {name: values[min(chip, len(values) - 1)] for name, values in lists.items()}
            for chip in range(max(map(len, lists.values()), default=1))
        )

    def describe(self, facts: Mapping[str, str]) -> str:
        """``facts`` in a sentence, with the names of their chips, if each of them has one."""
        chips = self.per_chip(facts)
        names = list(filter(None, map(self._name_of, chips)))
        if len(names) < len(chips):
            return pairs(facts)
        others = {name: value for name, value in facts.items() if name not in chips[0]}
        return ", ".join(filter(None, [*names, pairs(others)]))

    def _name_of(self, facts: Mapping[str, str]) -> str | None:
        names = [
            name
            for name, chip in self.chips.items()
            if facts and chip.source and facts.items() <= chip.facts.items()
        ]
        return names[0] if len(names) == 1 else None

    def loading(self, options: Mapping[str, str]) -> dict[str, str]:
        """Those of ``options`` that count when a session opens the artifact."""
        return {
            name: value
            for name, value in options.items()
            if (name not in self.options or self.options[name].scope != "compile")
            and not (self.profiles and name in self.profiles.names)
        }

    def disagreements(
        self, compatibility: str, ep_sdk_versions: Iterable[str], options: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield how the contexts of one model disagree with ``options``; see `disagreement`."""
        # A node that only refers to another node's context may have no version.
        for version in dict.fromkeys(filter(None, ep_sdk_versions)) or ("",):
            if disagreement := self.disagreement(compatibility, version, options):
                yield disagreement

    def result_file(self, model: str) -> str:
        """The name of the file that ``model`` is compiled into."""
        return f"{model}_{'ctx' if self.product == 'context' else 'optimized'}.onnx"

    def unavailable(self, python: tuple[int, int], system: str, machine: str = "") -> str | None:
        """Why ``requirements`` cannot be installed on this version of Python, this ``sys.platform`` and this
        ``platform.machine()``; None if they can.
        """
        if self.by_library and machine.lower() not in ("", "x86_64", "amd64"):
            return f"has a library for x86-64 only, and this is {machine}"
        if python < self.python:
            oldest, this = (".".join(map(str, version)) for version in (self.python, python))
            return f"needs Python {oldest} or newer, and this is {this}"
        if self.systems and system not in self.systems:
            return f"has no packages for this system, {system}"
        return None

    def has_name(self, name: str) -> bool:
        """Whether ``name`` is one of its names, in any case and with or without "ExecutionProvider"."""
        own = {_normalized(spelling) for spelling in (self.name, self.ep)} - {""}
        return _normalized(name) in own


def _normalized(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).casefold().removesuffix("executionprovider")

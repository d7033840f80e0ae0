"""This machine as a board: the devices that run a package's variants, and a report of them."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from statistics import median

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import FILE as PYPROJECT
from hatch_epcontext.config.pyproject import tool_table
from hatch_epcontext.config.settings import Target
from hatch_epcontext.errors import InspectionError, Kind, Problem, UnavailableError
from hatch_epcontext.files import is_inside, is_regular, temp_dir
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.boards import BoardRun, verdict_of
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.sources import cut_and_read
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.package.wheel import DAMAGED_ARCHIVE
from hatch_epcontext.providers import DISTRIBUTIONS
from hatch_epcontext.text import listing
from hatch_epcontext.tools.environment import chip_name, versions
from hatch_epcontext.tools.inspecting import inspect, verify
from hatch_epcontext.worker.requests import (
    Devices,
    DevicesRequest,
    EpDevice,
    LibraryRequest,
    TimeOpeningReply,
)
from hatch_epcontext.worker.results import Validation

RUNS = 20
"""How often a target is run after the warm-up, to measure its latency."""

_QUERY_TIMEOUT = 20.0
"""Seconds for a driver's command that lists devices."""

_CLASSES = {
    "gpu": "{4d36e968-e325-11ce-bfc1-08002be10318}",
    "npu": "{f01a9d53-3ff6-48d2-9f97-c8a7004be10c}",
}
"""Windows' classes of drivers by the kind of their devices (Microsoft, "System-Defined Device Setup Classes
Available to Vendors")."""


@dataclass(frozen=True)
class BoardDevice:
    """A ``device`` of this machine; ``simulated``: whether a simulator stands in for another one."""

    device: EpDevice
    simulated: bool = False

    def run(
        self,
        target: Target,
        compatibility: str,
        validation: Validation,
        timing: TimeOpeningReply | None,
    ) -> BoardRun:
        """What a report says of ``target``, which it ran: with ``timing`` if that was measured.

        ``compatibility``: the string of what was compiled.
        """
        provider = target.provider
        chip, driver = self._chip(target, provider.describe(provider.compiled_for(compatibility)))
        names = [provider.plugin.package] if provider.plugin else []
        return BoardRun(
            verdict=verdict_of(validation),
            chip=chip,
            driver=driver,
            system=platform.platform(),
            versions=versions((*DISTRIBUTIONS, *filter(None, names))),
            simulated=self.simulated,
            snr=None if validation.snr is None else round(validation.snr, 1),
            samples=len(validation.samples),
            synthetic=validation.synthetic,
            latency=round(median(timing.later), 7) if timing else None,
            runs=len(timing.later) if timing else 0,
            load=round(timing.load, 7) if timing else None,
        )

    def _chip(self, target: Target, compiled_for: str) -> tuple[str, str]:
        """What runs ``target``, and the version of its driver, empty if nothing says it."""
        provider, facts = target.provider, self.device.metadata
        if self.simulated:
            return compiled_for or provider.title, ""
        kind = self.device.kind
        name, driver = facts.get(provider.name_fact, ""), facts.get(provider.driver_fact, "")
        driver = driver or _windows_driver(kind, name)
        listed = _query(provider.device_query) if kind == "gpu" else None
        # The EP may use a GPU of another vendor.
        if listed and listed[0].casefold().startswith(self.device.vendor.casefold()):
            name, driver = name or listed[0], driver or listed[1]
        if kind == "cpu":
            name = name or chip_name() or ""
        return name or compiled_for or f"{provider.ep} on {kind}", driver


class Board:
    """The devices of this machine, as ``workers`` find them; with ``any_device`` also simulated ones."""

    def __init__(self, workers: Workers, *, any_device: bool) -> None:
        self._workers, self._any_device = workers, any_device
        self._known: dict[tuple[str, str], Devices] = {}

    def device(self, target: Target) -> BoardDevice:
        """The device that runs what is compiled for ``target``; raises UnavailableError if there is none."""
        provider, kind = target.provider, target.settings.device
        if provider.plugin is None:
            # ONNX Runtime lists no devices of its own EPs.
            return BoardDevice(EpDevice(provider.ep, kind, ""))
        known = self._devices(target)
        offered = [device for device in known.devices if device.ep == provider.ep]
        fitting = [device for device in offered if kind in (device.kind, "any")]
        if fitting:
            return BoardDevice(fitting[0])
        is_simulated = bool(offered and provider.simulator)
        if is_simulated and self._any_device:
            return BoardDevice(offered[0], simulated=True)
        message = known.reason or f"{provider.ep} finds no device that is {kind}."
        if is_simulated:
            message = f"{provider.ep} only simulates its device here; --device any accepts that."
        raise UnavailableError(Problem(Kind.NO_DEVICE, "", message))

    def _devices(self, target: Target) -> Devices:
        provider = target.provider
        module = provider.plugin.module if provider.needs_library and provider.plugin else ""
        key = provider.name, module
        if key not in self._known:
            call = partial(self._workers.call, location=provider.ep)
            if module:
                devices = call(LibraryRequest(module=module))
            else:
                devices = call(DevicesRequest((provider.name,))).devices
            self._known[key] = next(iter(devices.values()))
        return self._known[key]


def _query(command: Sequence[str]) -> tuple[str, str] | None:
    """The name and the driver's version of the first device that ``command`` prints; None without one."""
    if not command:
        return None
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    name, _, driver = answer.stdout.partition("\n")[0].rpartition(",")
    return (name.strip(), driver.strip()) if name else None


def _windows_driver(kind: str, name: str) -> str:
    """The version of the driver of the device ``name``, or of the only one of its ``kind``."""
    known: dict[str, str] = {}
    if sys.platform == "win32" and kind in _CLASSES:
        import winreg

        path = rf"SYSTEM\CurrentControlSet\Control\Class\{_CLASSES[kind]}"
        for number in range(100):
            with (
                contextlib.suppress(OSError),
                winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, rf"{path}\{number:04}") as key,
            ):
                described = str(winreg.QueryValueEx(key, "DriverDesc")[0])
                known[described] = str(winreg.QueryValueEx(key, "DriverVersion")[0])
    return known.get(name, next(iter(known.values())) if len(known) == 1 else "")


@contextlib.contextmanager
def unpacked(package: str) -> Iterator[Path]:
    """The folder of the only model package in ``package``: a wheel, a folder, or an installed import package.

    Raises InspectionError if there is none, or a file of a wheel differs from its record.
    """
    path = Path(package)
    if not path.exists() and package.isidentifier():
        spec = importlib.util.find_spec(package)
        path = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else path
    inspection = inspect(path)
    if len(inspection.packages) != 1:
        folders = listing(inspection.packages) or "none"
        message = f"must have one model package, and has {folders}."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message))
    ((folder, manifest),) = inspection.packages.items()
    if path.is_dir():
        yield path / folder
        return
    # Which also says that the archive has each file in the package, with the size in its record.
    verify(path, inspection)
    with temp_dir() as target:
        try:
            with zipfile.ZipFile(path) as archive:
                for name in (*manifest.files, FILE):
                    archive.extract(str(PurePosixPath(folder, name)), target)
        except DAMAGED_ARCHIVE as error:
            message = f"is damaged: {error}."
            raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message)) from error
        yield target / folder


@contextlib.contextmanager
def project_models(
    sdist: Path | None, make_workers: Callable[[float], Workers]
) -> Iterator[Mapping[str, Source]]:
    """The source models of the project in ``sdist``, an archive or a folder, by their names.

    Those that are not in it are left out, and language models. Raises InspectionError if it is no sdist,
    ConfigError as `load` does, and BuildError if a model cannot be read.
    """
    if sdist is None:
        yield {}
        return
    with temp_dir() as staging:
        root = sdist.absolute() if sdist.is_dir() else _unpack_sdist(sdist, staging / "sdist")
        config = load(root, tool_table(root), {}, {}, pending=True)
        models = (
            replace(model, targets=())
            for model in config.models
            if is_regular(model.path) and not (model.download or model.genai)
        )
        config = replace(config, models=tuple(models))
        cache = Cache(None, lambda line: None)
        with make_workers(config.build.timeout) as workers:
            sources = cut_and_read(config, cache, workers, staging)
        yield {source.model.name: source for source in sources}


def _unpack_sdist(sdist: Path, target: Path) -> Path:
    """Write the files of ``sdist`` into ``target``; returns the project's folder in it."""
    try:
        with tarfile.open(sdist) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and is_inside(member.name):
                    (target / member.name).parent.mkdir(parents=True, exist_ok=True)
                    with (target / member.name).open("wb") as file:
                        shutil.copyfileobj(content, file)
    except (*DAMAGED_ARCHIVE, tarfile.TarError) as error:
        message = f"is damaged, or no sdist: {error}."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(sdist), message)) from error
    folders = [file.parent for file in target.glob(f"*/{PYPROJECT}")]
    if len(folders) != 1:
        message = f"is no sdist: it has no folder with one {PYPROJECT}."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(sdist), message))
    return folders[0]

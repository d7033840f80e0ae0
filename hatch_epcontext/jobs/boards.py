"""Reports of boards: how what a package contains agrees with its sources on machines that have the devices.

`epcontext validate --report` writes them, and the next build takes those that are about what it compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from hatch_epcontext.files import FileRecord
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.worker.results import Validation

REPORT_FORMAT = 1
"""The version of the reports' format."""

BoardVerdict = Literal["agrees", "sensitive", "differs", "inconclusive", "not-compared"]
"""What a report says of a target that was run."""


_IN_WORDS: Mapping[BoardVerdict, str] = {
    "sensitive": "agrees, but is SENSITIVE,",
    "inconclusive": "ran, INCONCLUSIVE,",
    "not-compared": "ran, NOT compared,",
}


@dataclass(frozen=True)
class BoardRun:
    """A run of a target on a machine that has its device.

    ``chip``: what ran it, as the system or the EP names it, or else what the context was compiled for;
    ``driver``: its version, empty if nothing says it. ``versions``: of ONNX Runtime and the EP.
    ``system``: as `platform.platform`. ``simulated``: whether a simulator stood in for the device.
    ``snr``: the smallest signal-to-noise ratio of an output in decibels, None if all are equal.
    ``samples``: how many inputs were compared; ``synthetic`` if they were generated. ``latency``: the median
    seconds of ``runs`` after a warm-up, and ``load`` the seconds to open it; None of a simulator.
    """

    verdict: BoardVerdict
    chip: str
    driver: str
    system: str
    versions: Mapping[str, str]
    simulated: bool = False
    snr: float | None = None
    samples: int = 0
    synthetic: bool = True
    latency: float | None = None
    runs: int = 0
    load: float | None = None

    @property
    def board(self) -> tuple[object, ...]:
        """What is the same of all runs that should have one verdict."""
        return self.chip, self.driver, dict(self.versions), self.simulated


@dataclass(frozen=True)
class BoardEntry:
    """The variant ``target`` of the component ``model``, and how it ran.

    ``source_sha256``: what identifies the source and its sizes, as `Source.identity`. ``files``: those of the
    variant by their path in its folder; ``reference``: those of the variant that it was compared with.
    ``run``: None if it was not opened and run; ``reason``: why, or why it is not compared.
    """

    model: str
    target: str
    ep: str
    source_sha256: str
    files: Mapping[str, FileRecord]
    run: BoardRun | None
    reference: Mapping[str, FileRecord] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class BoardReport:
    """The targets of the wheel or folder ``package`` on one machine."""

    format: int
    generator: str
    package: str
    entries: tuple[BoardEntry, ...]


def verdict_of(validation: Validation) -> BoardVerdict:
    """The verdict of a ``validation`` on the device."""
    if validation.differs:
        return "differs"
    if validation.inconclusive:
        return "inconclusive"
    if not validation.compared:
        return "not-compared"
    return "sensitive" if validation.sensitive else "agrees"


def describe_run(run: BoardRun) -> str:
    """The run in a few words: ``"agrees on Snapdragon X Elite (driver 1.2), 2.1 ms"``."""
    where = f"the simulator of {run.chip}" if run.simulated else run.chip
    driver = f" (driver {run.driver})" if run.driver else ""
    latency = ""
    if run.latency is not None:
        is_long = run.latency >= 1
        latency = f", {run.latency:.2f} s" if is_long else f", {1000 * run.latency:.3g} ms"
    return f"{_IN_WORDS.get(run.verdict, run.verdict)} on {where}{driver}{latency}"


def report_files(reports: Path | None) -> list[Path]:
    """The files of the ``reports``: those of a folder that end in ``.json``, in order, or the file itself."""
    if reports is None or not reports.is_dir():
        return [reports] if reports else []
    return sorted(reports.glob("*.json"), key=lambda file: file.name)

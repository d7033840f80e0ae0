"""Finished wheels and sdists of other build back ends, written anew with the models in them.

Contents, modes and times of their own files stay as they are, but for WHEEL and RECORD. Format of wheels:
https://packaging.python.org/en/latest/specifications/binary-distribution-format/
"""

from __future__ import annotations

import base64
import contextlib
import csv
import gzip
import hashlib
import io
import re
import tarfile
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from email.parser import Parser
from pathlib import Path
from typing import IO

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Kind, Problem, WheelError
from hatch_epcontext.files import remove
from hatch_epcontext.package.wheel import ProjectMetadata, source_date, tag

_CHUNK = 1 << 20

_FIRST_OF_ZIP = 315532800
"""The earliest time in a zip file: 1980-01-01."""


class FinishedWheel:
    """The wheel at ``path``, which a build back end has written; raises WheelError if it is signed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.names = [info.filename for info in archive.infolist() if not info.is_dir()]
            (wheel,) = (
                name for name in self.names if re.fullmatch(r"[^/]+\.dist-info/WHEEL", name)
            )
            self.info = wheel.removesuffix("/WHEEL")
            """Its folder for metadata."""
            entry_points = f"{self.info}/entry_points.txt"
            self._texts = {
                name: archive.read(name).decode()
                for name in (wheel, f"{self.info}/METADATA", entry_points)
                if name in self.names
            }
        for name in ("RECORD.jws", "RECORD.p7s"):
            if f"{self.info}/{name}" in self.names:
                message = f"it has {name}, and a signature fits no changed wheel."
                hint = "Sign the wheel after the build."
                raise WheelError(Problem(Kind.INVALID_WHEEL, path.name, message, hint))

    @property
    def project(self) -> ProjectMetadata:
        """What its metadata say of the project."""
        entry_points = self._texts.get(f"{self.info}/entry_points.txt", "")
        freezes = "[pyinstaller40]" in entry_points
        return ProjectMetadata.read(self._texts[f"{self.info}/METADATA"], freezes=freezes)

    def checked_tag(self, config: Config) -> str | None:
        """The tag that ``config`` gives it: only a wheel for all platforms gets another one.

        Raises ConfigError for targets with ``platforms`` that are none of the wheel's.
        """
        tags = Parser().parsestr(self._texts[f"{self.info}/WHEEL"]).get_all("Tag", [])
        if tags == ["py3-none-any"]:
            return tag(config)
        systems = set[str]().union(*(_systems(name.rpartition("-")[2]) for name in tags))
        problems = [
            Problem.at(
                target.place("platforms"),
                Kind.CONFLICTING_KEYS,
                f"has no platform of the wheel: {self.path.name}.",
                f"Leave the target out of this build, with {PREFIX}TARGETS=<names>.",
            )
            for target in config.targets
            if target.platforms
            and systems.isdisjoint(set().union(*map(_systems, target.platforms)))
            if "any" not in (*target.platforms, *systems)
        ]
        if problems:
            raise ConfigError(*problems)
        return None

    def write(
        self, folder: Path, files: Mapping[str, Path], tag: str | None, left_out: Collection[str]
    ) -> Path:
        """Write it into ``folder`` with ``files``, by their paths in it, without those ``left_out``.

        ``tag`` replaces its own.
        """
        name, wheel, record = self.path.name, f"{self.info}/WHEEL", f"{self.info}/RECORD"
        metadata = self._texts[wheel]
        if tag is not None:
            name, metadata = f"{name.rsplit('-', 3)[0]}-{tag}.whl", _with_tag(metadata, tag)
        rows = list[tuple[str, ...]]()
        with (
            _whole_or_none(folder / name) as target,
            zipfile.ZipFile(self.path) as old,
            zipfile.ZipFile(target, "w") as new,
        ):
            own = [info for info in old.infolist() if info.filename not in (record, *left_out)]
            # Metadata come last, as the format recommends.
            for info in sorted(
                [*own, *(_added(path, files[path]) for path in sorted(files))],
                key=lambda info: info.filename.startswith(f"{self.info}/"),
            ):
                path, digest = info.filename, hashlib.sha256()
                if path == wheel:
                    opened: IO[bytes] = io.BytesIO(metadata.encode())
                else:
                    opened = files[path].open("rb") if path in files else old.open(info)
                with opened, new.open(copy(info), "w") as packed:
                    while chunk := opened.read(_CHUNK):
                        packed.write(chunk)
                        digest.update(chunk)
                    size = opened.tell()
                if not info.is_dir():
                    code = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
                    rows.append((path, f"sha256={code}", str(size)))
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
            new.writestr(old.getinfo(record), text.getvalue())
        return target


@contextlib.contextmanager
def _whole_or_none(file: Path) -> Iterator[Path]:
    """Remove ``file`` if an error ends what writes it."""
    try:
        yield file
    except BaseException:
        remove(file)
        raise


def _with_tag(wheel: str, tag: str) -> str:
    """WHEEL with ``tag``, expanded, in place of its own."""
    python, abi, platforms = tag.split("-")
    lines = [line for line in wheel.splitlines() if line and not line.startswith("Tag:")]
    tags = (f"Tag: {python}-{abi}-{platform}" for platform in platforms.split("."))
    return "\n".join([*lines, *tags, ""])


def _systems(platform: str) -> set[str]:
    """A platform's tag without the version of the system, such as ``linux_x86_64``."""
    system = re.sub(r"^(?:many|musl)?(linux|macosx)[a-z]*[\d_]*?_(?=[a-z])", r"\1_", platform)
    return {"macosx_arm64", "macosx_x86_64"} if system == "macosx_universal2" else {system}


def _added(path: str, file: Path) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, time.gmtime(max(source_date(), _FIRST_OF_ZIP))[:6])
    # Above 4 GiB it has another format.
    info.file_size = file.stat().st_size
    info.external_attr = 0o100644 << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def names_of_sdist(sdist: Path) -> list[str]:
    """The regular files in ``sdist``, by their paths in the project."""
    with tarfile.open(sdist) as archive:
        return [member.name.partition("/")[2] for member in archive if member.isreg()]


def write_sdist(
    sdist: Path, folder: Path, files: Mapping[str, Path], left_out: Collection[str]
) -> Path:
    """Write ``sdist`` into ``folder`` with ``files``, by their paths in the project, without ``left_out``."""
    with (
        _whole_or_none(folder / sdist.name) as target,
        tarfile.open(sdist) as old,
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=source_date()) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in old:
            if member.name.partition("/")[2] not in left_out:
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
        for path, source in sorted(files.items()):
            added = tarfile.TarInfo(f"{sdist.name.removesuffix('.tar.gz')}/{path}")
            added.size, added.mtime = source.stat().st_size, source_date()
            with source.open("rb") as file:
                new.addfile(added, file)
    return target

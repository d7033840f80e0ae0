"""Finished wheels and sdists of other build back ends, written anew with the models in them.

Contents, modes and times of their own files stay as they are, but for WHEEL and RECORD. Format of wheels:
https://packaging.python.org/en/latest/specifications/binary-distribution-format/
"""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import gzip
import hashlib
import io
import itertools
import re
import struct
import tarfile
import time
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import IO

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hatch_epcontext.config.environ import PREFIX, source_date
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Kind, Problem, SdistError, WheelError
from hatch_epcontext.files import is_inside
from hatch_epcontext.package.wheel import DAMAGED_ARCHIVE, ProjectMetadata, tag
from hatch_epcontext.system import cores
from hatch_epcontext.text import MAX_NAMED, listing, show

_CHUNK = 1 << 20

_FIRST_OF_ZIP = 315532800
"""The earliest time in a zip file: 1980-01-01."""

_LARGE = 10 * 10**6
"""The most bytes of a file that is deflated whatever it contains."""

_WORTH = 0.85
"""The part of its size to which a large file shrinks at least if it is deflated."""

_MUCH = 5 * 10**6
"""Bytes of files from which deflating them on several cores saves more than writing a wheel anew takes."""

_MOST_THREADS = 4
"""The most threads that deflate: each has a file up to `_LARGE` in memory, and what it becomes."""

INCOMPLETE = "models_are_missing.dist-info/NOTE"
"""A file of a wheel without its models: installers reject a wheel with a second ``.dist-info``."""


class FinishedWheel:
    """The wheel at ``path``, which the build back end ``maker`` has written.

    Raises WheelError if it is none, or is signed.
    """

    def __init__(self, path: Path, maker: str) -> None:
        self.path, self._maker = path, maker
        try:
            name, version, _, self.tags = parse_wheel_filename(path.name)
            with self._readable(), zipfile.ZipFile(path) as archive:
                infos = archive.infolist()
                names = [info.filename for info in infos if not info.is_dir()]
                self.names = [name for name in names if name != INCOMPLETE]
                self.info = self._checked_info()
                """Its folder for metadata."""
                texts = ("WHEEL", "METADATA", "entry_points.txt")
                paths = [f"{self.info}/{name}" for name in texts]
                self._texts = {
                    path.rpartition("/")[2]: archive.read(path).decode()
                    for path in paths
                    if path in self.names
                }
        except InvalidWheelFilename as error:
            raise self._error(f"{error}.") from None
        for signature in ("RECORD.jws", "RECORD.p7s"):
            if f"{self.info}/{signature}" in self.names:
                message = f"it has {signature}, and a signature fits no changed wheel."
                raise self._error(message, "Sign the wheel after the build.")
        self.project = self._checked_project(name, version)
        """What its metadata say of the project."""

    def _checked_info(self) -> str:
        """The folder for metadata; raises WheelError if the names of files are not those of a wheel."""
        names = [name.split("/") for name in self.names]
        folders = {parts[0] for parts in names if parts[0].endswith(".dist-info") and parts[1:]}
        if len(folders) != 1:
            others = listing(sorted(folders)) if folders else "no folder *.dist-info"
            raise self._error(f"it has {others}, and a wheel has one.")
        (info,) = folders
        missing = [f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL")]
        if missing := [path for path in missing if path not in self.names]:
            raise self._error(f"it lacks {listing(missing)}.")
        if repeated := [name for name, number in Counter(self.names).items() if number > 1]:
            raise self._error(f"it has several files with one name: {listing(repeated)}.")
        if outside := [name for name in self.names if not is_inside(name)]:
            raise self._error(f"it has files outside of its folder: {listing(outside)}.")
        return info

    def _checked_project(self, name: str, version: Version) -> ProjectMetadata:
        """What its metadata say of the project ``name``; raises WheelError if no installer takes them."""
        if not re.search(r"(?im)^Wheel-Version:\s*1\.", self._texts["WHEEL"]):
            raise self._error("its WHEEL lacks Wheel-Version: 1.0.")
        freezes = "[pyinstaller40]" in self._texts.get("entry_points.txt", "")
        project = ProjectMetadata.read(self._texts["METADATA"], freezes=freezes)
        own = project.name and canonicalize_name(project.name), _version(project.version)
        if own != (name, version):
            its = f"{show(project.name)} with the version {show(project.version)}"
            raise self._error(f"its METADATA names {its}, and its own name says {name} {version}.")
        try:
            for dependency in project.dependencies:
                Requirement(dependency)
        except InvalidRequirement as error:
            raise self._error(f"its METADATA has an invalid requirement: {error}.") from None
        return project

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Raise WheelError for what `zipfile` raises for a damaged archive."""
        try:
            yield
        except (*DAMAGED_ARCHIVE, ValueError, IndexError, struct.error, OSError) as error:
            # The system rejects negative positions in a file with this one.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise self._error(f"it cannot be read: {error}.") from None

    def _error(self, message: str, hint: str | None = None) -> WheelError:
        location = f"{self.path.name} of {self._maker}"
        return WheelError(Problem(Kind.INVALID_WHEEL, location, message, hint))

    def checked_tag(self, config: Config, warn: Callable[[str], None]) -> str | None:
        """The tag that ``config`` gives it: only a wheel for all platforms gets another one.

        It stays for the versions of Python that the back end names, except 2, which no loader is for, unless
        ``wheel.tag`` names others. Raises ConfigError for ``platforms`` that are none of the wheel's.
        """
        python, abi, platform = self.path.stem.split("-")[-3:]
        new, platforms = tag(config), platform.split(".")
        if "any" in platforms:
            if new is None or config.wheel.tag != "auto":
                return new
            versions = [name for name in python.split(".") if not name.startswith("py2")]
            return f"{'.'.join(versions) or python}-{abi}-{new.rpartition('-')[2]}"
        if new and config.wheel.tag != "auto" and parse_tag(new) != self.tags:
            warn(f"the wheel's tag stays that of {self.path.name}: wheel.tag ({new}) is not used")
        systems = set[str]().union(*map(_systems, platforms))
        problems = [
            Problem.at(
                target.key_of("platforms"),
                Kind.CONFLICTING_KEYS,
                f"has no platform of the wheel: {self.path.name}.",
                f"Leave the target out of this build, with {PREFIX}TARGETS=<names>.",
            )
            for target in config.targets
            if target.platforms
            and systems.isdisjoint(set().union(*map(_systems, target.platforms)))
            if "any" not in target.platforms
        ]
        ConfigError.check(problems)
        return None

    def write(
        self,
        folder: Path,
        files: Mapping[str, Path],
        tag: str | None = None,
        left_out: Collection[str] = (),
    ) -> Path:
        """Write it into ``folder`` with ``files``, by their paths in it, without those ``left_out``.

        ``tag`` replaces its own.
        """
        name, wheel, record = self.path.name, f"{self.info}/WHEEL", f"{self.info}/RECORD"
        metadata = self._texts["WHEEL"]
        if tag is not None:
            name, metadata = f"{name.rsplit('-', 3)[0]}-{tag}.whl", _with_tag(metadata, tag)
        rows, target = list[tuple[str, ...]](), folder / name
        with (
            self._readable(),
            zipfile.ZipFile(self.path) as old,
            zipfile.ZipFile(target, "w") as new,
        ):
            others = (record, INCOMPLETE, *left_out)
            own = [info for info in old.infolist() if info.filename not in others]
            # Metadata come last, as the format recommends.
            ordered = sorted(
                [*own, *(_added(path, files[path]) for path in sorted(files))],
                key=lambda info: info.filename.startswith(f"{self.info}/"),
            )
            deflated = _deflate_ahead(files[i.filename] for i in ordered if _is_ahead(i, files))
            for info in ordered:
                path, digest = info.filename, hashlib.sha256()
                compressor = None
                if path == wheel:
                    opened: IO[bytes] = io.BytesIO(metadata.encode())
                elif _is_ahead(info, files):
                    content, compressor = next(deflated)
                    opened = io.BytesIO(content)
                else:
                    opened = files[path].open("rb") if path in files else old.open(info)
                with opened, new.open(copy(info), "w") as packed:
                    if compressor is not None:
                        vars(packed)["_compressor"] = compressor
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


def _version(text: str | None) -> Version | None:
    """The version that is ``text``; None if it is none."""
    with contextlib.suppress(InvalidVersion):
        return Version(text or "")
    return None


def _with_tag(wheel: str, tag: str) -> str:
    """WHEEL with ``tag``, expanded, instead of its own."""
    lines = [line for line in wheel.splitlines() if line and not line.startswith("Tag:")]
    parts = (part.split(".") for part in tag.split("-"))
    tags = (f"Tag: {'-'.join(names)}" for names in itertools.product(*parts))
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
    info.compress_type = zipfile.ZIP_DEFLATED if _shrinks(file) else zipfile.ZIP_STORED
    return info


def is_faster(files: Collection[Path]) -> bool:
    """Whether it pays to add ``files`` to a finished wheel: hatchling deflates all of them, on one core.

    Machines with one core do it too: the wheel is the same on all.
    """
    is_much = sum(file.stat().st_size for file in files) >= _MUCH
    return is_much or not all(map(_shrinks, files))


def _is_ahead(info: zipfile.ZipInfo, files: Mapping[str, Path]) -> bool:
    """Whether the content of ``info`` is one of ``files`` that are deflated in memory."""
    is_small = info.file_size <= _LARGE
    return info.filename in files and is_small and info.compress_type == zipfile.ZIP_DEFLATED


def _deflate_ahead(files: Iterable[Path]) -> Iterator[tuple[bytes, _Deflated]]:
    """Yield the contents of ``files`` in order, deflated by several threads, which are a few files ahead."""
    number = min(cores(), _MOST_THREADS)
    with ThreadPoolExecutor(number) as pool:
        ahead = deque[Future[tuple[bytes, _Deflated]]]()
        for file in files:
            ahead.append(pool.submit(_Deflated.read, file))
            if len(ahead) > number:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class _Deflated:
    """Takes the place of the compressor with which `zipfile` writes a file."""

    def __init__(self, content: bytes) -> None:
        # As zipfile does it.
        deflating = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        self._all = deflating.compress(content) + deflating.flush()

    @staticmethod
    def read(file: Path) -> tuple[bytes, _Deflated]:
        """The content of ``file``, and what deflates to it."""
        content = file.read_bytes()
        return content, _Deflated(content)

    def compress(self, _: bytes) -> bytes:
        """Nothing: `flush` has all."""
        return b""

    def flush(self) -> bytes:
        """The whole deflated content."""
        return self._all


def _shrinks(file: Path) -> bool:
    """Whether deflating ``file`` is worth its time: of large weights it takes nearly all of a build."""
    if file.stat().st_size <= _LARGE:
        return True
    with file.open("rb") as opened:
        sample = opened.read(_CHUNK)
    return len(zlib.compress(sample)) < _WORTH * len(sample)


def names_of_sdist(sdist: Path, maker: str) -> list[str]:
    """The regular files in ``sdist``, by their paths in the project; the build back end ``maker`` wrote it.

    Raises SdistError if it cannot be read, or does not consist of the folder with its name.
    """
    folder, problem = sdist.name.removesuffix(".tar.gz"), ""
    try:
        with tarfile.open(sdist, encoding="utf-8") as archive:
            members = archive.getmembers()
    except (tarfile.TarError, gzip.BadGzipFile, *DAMAGED_ARCHIVE, ValueError) as error:
        problem = f"it cannot be read: {error}."
    else:
        outside = [member.name for member in members if member.name.split("/")[0] != folder]
        if folder == sdist.name or not members:
            problem = "an sdist is a .tar.gz with the files of the project."
        elif outside:
            problem = f"it has files outside of the folder {folder}: {listing(outside, MAX_NAMED)}."
    if problem:
        raise SdistError(Problem(Kind.NOT_IN_SDIST, f"{sdist.name} of {maker}", problem))
    return [member.name.partition("/")[2] for member in members if member.isreg()]


def write_sdist(
    sdist: Path, folder: Path, files: Mapping[str, Path], left_out: Collection[str]
) -> Path:
    """Write ``sdist`` into ``folder`` with ``files``, by their paths in the project, without ``left_out``."""
    target = folder / sdist.name
    with (
        tarfile.open(sdist, encoding="utf-8") as old,
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=source_date()) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as new,
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

"""Locations in ``pyproject.toml`` -> their commits, hashes, external data and licenses.

What is downloaded for that stays in the user's cache, where builds find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from tomlkit.items import InlineTable

from hatch_epcontext.config.location import (
    DOWNLOADS,
    Download,
    HubFile,
    beside,
    check_url,
    file_of,
    hub_file,
    hub_page,
    is_of_hub,
)
from hatch_epcontext.config.pyproject import FILE, Lines, parse, try_parse
from hatch_epcontext.errors import BuildError, ConfigError, Key, Kind, Problem
from hatch_epcontext.files import MAX_BYTES, file_sha256, is_portable, is_sha256, write_atomically
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs import web
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.jobs.downloads import (
    PINNING,
    Downloading,
    FailedError,
    Log,
    advice,
    check_allowed,
    check_root,
    copied,
    described,
    fetch,
    fetch_pinned,
    keep,
    locked,
    near_files,
    record_file,
    recorded_files,
)
from hatch_epcontext.jobs.processes.process import Heartbeat
from hatch_epcontext.package.external_data import external_data
from hatch_epcontext.system import writing
from hatch_epcontext.text import show, suggestion, to_toml


@dataclass(frozen=True)
class Pinned:
    """A pinned location: what belongs in the model's table. ``path``: the model's file in the user's cache.

    ``license``: an SPDX expression, if the hub knows one. ``warnings``: sentences about its terms.
    """

    download: Download
    path: Path
    license: str | None = None
    warnings: tuple[str, ...] = ()


def pin(text: str, root: Path, log: Log, *, offline: bool) -> tuple[str, list[Pinned]]:
    """``text``, a ``pyproject.toml``, with all its locations pinned; comments and other keys stay.

    ``root``: the folder of the user's cache; ``offline``: whether the user forbids downloads. Raises
    ConfigError if it is not TOML, and BuildError with the problems of all locations that cannot be pinned.
    """
    try:
        # First the strict reader: the other one has errors of its own.
        parse(text)
        document = tomlkit.parse(text)
    except (ValueError, RecursionError) as error:
        message = f"is not TOML: {error}."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, FILE, message)) from error
    problems: list[Problem] = []
    done, added = dict[Key, Pinned](), {}
    for key, table in _tables(document):
        if _is_pinned(table, root, offline=offline):
            continue
        try:
            pinned = pin_location(str(table["url"]), root, log, _digest(table), offline=offline)
        except FailedError as error:
            problems.append(Problem.at(key / "url", error.kind, str(error), error.hint))
            continue
        done[key], added[key / "url"] = pinned, _write(table, pinned)
    if problems:
        raise BuildError(*problems)
    result = _with_lines(tomlkit.dumps(document), added)
    _check(result, done)
    return result, [*done.values()]


def _check(text: str, done: Mapping[Key, Pinned]) -> None:
    """Raise ConfigError unless ``text`` has what was pinned: a value of several lines can be in the way."""
    tables = {key.parts: table for key, table in _tables(try_parse(text) or {})}
    for key, pinned in done.items():
        table, download = tables.get(key.parts, {}), pinned.download
        if (table.get("url"), table.get("sha256")) != (download.url, download.sha256):
            message = "cannot be completed, and nothing is written."
            hint = "Write it on one line, as a plain string."
            raise ConfigError(Problem.at(key / "url", Kind.INVALID_PYPROJECT, message, hint))


def _tables(document: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """The tables of models with locations."""
    tool = document.get("tool")
    own = tool.get("epcontext") if isinstance(tool, dict) else None
    models = own.get("models", []) if isinstance(own, dict) else []
    if not isinstance(models, list):
        raise ConfigError(Problem.at(Key() / "models", Kind.WRONG_TYPE, "must be a list."))
    for index, table in enumerate(models):
        if isinstance(table, dict) and isinstance(table.get("url"), str):
            yield Key(("models", index), str(table["url"]), table.get("name")), table


def _digest(table: Mapping[str, Any]) -> str | None:
    """The sha256 that is pinned already; None if the location may have other contents by now."""
    digest, hub = str(table.get("sha256", "")), hub_file(str(table["url"]))
    return digest if is_sha256(digest) and (hub is None or hub.is_pinned) else None


def _is_pinned(table: Mapping[str, Any], root: Path, *, offline: bool) -> bool:
    """Whether nothing is missing in the table of a model, as far as the cache at ``root`` shows."""
    url, digest, data = str(table["url"]), _digest(table), table.get("data", {})
    if digest is None or (hub_file(url) and "license" not in table and not offline):
        return False
    if check_url(url) is not None or not isinstance(data, dict):
        return True
    files = {str(name): str(each) for name, each in data.items()}
    path = root / DOWNLOADS / Download(url, digest, files).key / file_of(url)
    try:
        return {*external_data(path)} == {*data}
    except (OSError, ValueError):
        # It is not on this machine.
        return offline or "data" in table


def table_of(pinned: Pinned) -> dict[str, Any]:
    """What belongs in the table of a model: its keys with their values."""
    download = pinned.download
    found = {
        "url": download.url,
        "sha256": download.sha256,
        "data": dict(download.data),
        "license": pinned.license,
    }
    return {key: value for key, value in found.items() if value}


def _write(table: Any, pinned: Pinned) -> list[str]:
    """Write what is pinned into the keys of ``table``; returns the lines of those that it lacks."""
    lines = []
    for key, value in table_of(pinned).items():
        if key not in table:
            lines.append(f"{key} = {to_toml(value)}")
        elif key == "data" and isinstance(table[key], dict):
            # In place, because of its comments.
            for name in [each for each in table[key] if each not in value]:
                del table[key][name]
            for name in (each for each in value if table[key].get(each) != value[each]):
                table[key][name] = value[name]
        elif key != "license" and table[key] != value:
            # A license that somebody chose stays.
            table[key] = value
    if table.get("data") and not pinned.download.data:
        del table["data"]
    if isinstance(table, InlineTable):
        table.update(parse("\n".join(lines)))
        return []
    return lines


def _with_lines(text: str, added: Mapping[Key, Sequence[str]]) -> str:
    """``text`` with the lines of ``added``, each after that of its key."""
    lines = text.split("\n")
    end = "\r" if "\r\n" in text else ""
    places = {Lines(text).of(key) or 0: each for key, each in added.items()}
    for number, each in sorted(places.items(), reverse=True):
        lines[number:number] = [f"{line}{end}" for line in each]
    return "\n".join(lines)


def pin_location(
    url: str, root: Path, log: Log, digest: str | None = None, *, offline: bool
) -> Pinned:
    """Pin the location ``url``, also a link that people copy from a hub's pages; raises FailedError.

    ``digest``: the hex sha256 that its file must have, if that is pinned already; ``offline``: as for `pin`.
    The model itself is downloaded; of its external data what the hub has no hash of.
    """
    endpoint = web.HUB
    with contextlib.suppress(web.WebError):
        endpoint = web.hub_endpoint()
    hub = hub_page(url, endpoint) or hub_file(url)
    if hub is None and is_of_hub(url, endpoint):
        message = f"{show(url)} names no file of a model on the hub."
        hint = "Write it like hf://org/repo/model.onnx, or copy the link of the file's page."
        raise FailedError(message, hint, Kind.INVALID_VALUE)
    if hub is None and (allowed := check_url(url)):
        raise FailedError(f"must be {allowed}.", "Correct it.", Kind.INVALID_VALUE)
    hint = "Unset it: to pin a location it must be read."
    check_allowed(url if hub is None else str(hub), offline, hint)
    known: Mapping[str, str | None] = {}
    terms: str | None = None
    warnings: tuple[str, ...] = ()
    if hub is not None:
        hub, known, terms, warnings = _ask_hub(hub)
        url = str(hub)
    try:
        with writing("a downloaded model", root):
            check_root(root)
            pinning = _Pinning(url, digest, root / DOWNLOADS, known, log, Heartbeat())
            with locked(root / DOWNLOADS / PINNING, log):
                download, path = pinning.run()
    except BuildError as error:
        problem = error.problems[0]
        raise FailedError(problem.message, problem.hint or "", problem.kind) from error
    return Pinned(download, path, terms, warnings)


def complete(pinned: Pinned, project: Path, log: Log) -> None:
    """Download what `pin_location` did not; raises FailedError and OSError."""
    folder = pinned.path.parent
    Downloading(pinned.download, folder, project, False, log, Heartbeat()).run(Index())


def _ask_hub(hub: HubFile) -> tuple[HubFile, Mapping[str, str | None], str | None, tuple[str, ...]]:
    """The file at its commit, the hashes of the repository's large files, the license, and warnings."""
    revision = hub.revision or "main"
    try:
        api = f"{web.hub_endpoint()}/api/models/{hub.repo}"
        answer = json.loads(web.read(f"{api}/revision/{web.quoted(revision)}?blobs=true"))
        files = {str(each["rfilename"]): each.get("lfs") for each in answer["siblings"]}
        known = {name: str(lfs["sha256"]) if lfs else None for name, lfs in files.items()}
        pinned = HubFile(hub.repo, str(answer["sha"]), hub.path)
        is_valid = pinned.is_pinned and all(
            each is None or is_sha256(each) for each in known.values()
        )
    except web.WebError as error:
        message = f"{hub} cannot be found: {error}."
        raise FailedError(message, advice(error, is_hub=True)) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        message = f"{web.hub_endpoint()} does not answer as a model hub does."
        raise FailedError(message, "Check HF_ENDPOINT.")
    if hub.path not in known:
        models = [name for name in known if name.endswith(".onnx")]
        message = f"{hub.repo} has no file {show(hub.path)} at {revision}."
        raise FailedError(message, suggestion(hub.path, models) or "Choose one of its files.")
    license_, warnings = _license(answer.get("cardData"), pinned)
    return pinned, known, license_, warnings


def _license(card: Any, hub: HubFile) -> tuple[str | None, tuple[str, ...]]:
    """The license in a model card as an SPDX expression, and warnings about it."""
    given = card if isinstance(card, dict) else {}
    name = given.get("license")
    page = f"{web.hub_endpoint()}/{hub.repo}"
    if not isinstance(name, str) or not name:
        return None, (f"{hub.repo} names no license: see {page}, and set license.",)
    if name == "other" and isinstance(given.get("license_name"), str):
        name = given["license_name"]
    try:
        return str(canonicalize_license_expression(name)), ()
    except InvalidLicenseExpression:
        plain = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "other"
        reference = f"LicenseRef-{plain}"
        warning = (
            f"{hub.repo} has the license {show(name)}, which is no SPDX license. The wheel redistributes the "
            f"model, or what is compiled from it: read its terms on {page}"
        )
        return reference, (warning,)


@dataclass(frozen=True)
class _Pinning:
    """Pins one location. ``digest``: the hex sha256 of its file, if that is pinned already.

    ``known``: the hashes that its hub knows, by the path in the repository.
    """

    url: str
    digest: str | None
    store: Path
    known: Mapping[str, str | None]
    log: Log
    beat: Heartbeat

    def run(self) -> tuple[Download, Path]:
        """The location with its hashes, and the model's file in the user's cache."""
        name = file_of(self.url)
        part = self._fetch(self.url, PROTOBUF_LIMIT)
        try:
            names = external_data(part)
        except ValueError as error:
            what = described(part)
            part.unlink()
            message = f"{self.url} is no ONNX model: {error}.{what}"
            raise FailedError(message, "Choose another file.", Kind.INVALID_MODEL) from error
        parts = {name: part}
        data = {}
        for each in names:
            if not is_portable(each) or each == name:
                message = f"the external data {each!r} of {self.url} is outside the model's folder."
                raise FailedError(message, "Choose another file.", Kind.EXTERNAL_DATA)
            if digest := self._known(beside(self.url, each)):
                data[each] = digest
            else:
                parts[each] = self._fetch(beside(self.url, each), MAX_BYTES)
                data[each] = file_sha256(parts[each])
        download = Download(self.url, file_sha256(part), data)
        folder = self.store / download.key
        with locked(folder, self.log):
            folder.mkdir(exist_ok=True)
            write_atomically(record_file(folder), json.dumps(dict(download.files)))
            for each, file in parts.items():
                place = folder / PurePosixPath(each)
                place.parent.mkdir(parents=True, exist_ok=True)
                keep(file, place)
        return download, folder / name

    def _known(self, url: str) -> str | None:
        """The hash that the hub knows of the file at ``url``, if any."""
        hub = hub_file(url)
        if hub is None:
            return None
        if hub.path not in self.known:
            message = f"{hub.repo} has no file {show(hub.path)}, which has weights of the model."
            raise FailedError(message, "Choose another file.", Kind.EXTERNAL_DATA)
        return self.known[hub.path]

    def _fetch(self, url: str, limit: int) -> Path:
        """A file beside the models in the cache: downloaded, or copied from where this machine has it."""
        self.store.mkdir(parents=True, exist_ok=True)
        part = self.store / f".{hashlib.sha256(url.encode()).hexdigest()[:32]}.part"
        digest = self._known(url)
        if url == self.url and self.digest is not None:
            digest = self.digest
        if digest is None:
            fetch(url, part, limit, self.beat, self.log, pinned=False)
        elif not any(copied(near, part, digest) for near in (*self._own(digest), *near_files(url))):
            fetch_pinned(url, part, digest, limit, self.beat, self.log)
        return part

    def _own(self, digest: str) -> Iterator[Path]:
        """The files with this hex sha256 of models in the cache."""
        for folder in self.store.iterdir():
            for name, each in (recorded_files(folder) or {}).items():
                if each == digest:
                    yield folder / name

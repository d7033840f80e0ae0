"""Locations in ``pyproject.toml`` -> their commits, hashes, external data and licenses.

What is downloaded for that stays in the user's cache, where builds find it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from hatch_epcontext.config.location import (
    Download,
    HubFile,
    beside,
    check_url,
    file_of,
    hub_file,
    hub_link,
)
from hatch_epcontext.config.pyproject import FILE, Lines, parse, try_parse
from hatch_epcontext.errors import BuildError, ConfigError, DownloadError, Key, Kind, Problem
from hatch_epcontext.files import MAX_BYTES, is_portable, is_sha256
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs import web
from hatch_epcontext.jobs.cache.store import Store
from hatch_epcontext.jobs.downloads import Downloads, check_allowed, described
from hatch_epcontext.package.external_data import external_data
from hatch_epcontext.text import show, suggestion, to_toml


@dataclass(frozen=True)
class Pinned:
    """A pinned location, whose files are in the user's cache. ``path``: the model's.

    ``license``: an SPDX expression, if the hub knows one. ``warnings``: sentences about its terms.
    """

    download: Download
    path: Path
    license: str | None = None
    warnings: tuple[str, ...] = ()


def pin(text: str, downloads: Downloads) -> tuple[str, list[Pinned]]:
    """``text``, a valid ``pyproject.toml`` but for locations that are not pinned, with these pinned.

    Only commits and missing keys are written. Raises BuildError with the problems of all locations
    that cannot be pinned, and ConfigError if a key cannot be written.
    """
    problems, pins = list[Problem](), dict[int, Pinned]()
    for index, table in enumerate(parse(text)["tool"]["epcontext"]["models"]):
        url = table.get("url") if isinstance(table, dict) else None
        if url is None or _is_pinned(table, downloads.store.root):
            continue
        key = Key(("models", index), url, table.get("name"))
        try:
            pins[index] = pinned = pin_location(url, downloads, table)
        except DownloadError as error:
            problems.append(Problem.at(key / "url", error.kind, str(error), error.hint))
            continue
        if table.get("data", pinned.download.data) != pinned.download.data:
            message = "does not have the files of the model's external data."
            hint = "Remove it, and run epcontext fetch --pin."
            problems.append(Problem.at(key / "data", Kind.EXTERNAL_DATA, message, hint))
    if problems:
        raise BuildError(*problems)
    return _with_pins(text, pins), [*pins.values()]


def _is_pinned(table: Mapping[str, Any], root: Path) -> bool:
    """Whether no hash is missing in the table of a model, as far as the cache shows."""
    url, hub, data = table["url"], hub_file(table["url"]), table.get("data", {})
    if "sha256" not in table or (hub and not hub.is_pinned):
        return False
    model = Download(url, table["sha256"], data).folder(root) / file_of(url)
    try:
        return {*external_data(model)} == {*data}
    except (OSError, ValueError):
        # It is not on this machine.
        return False


def table_of(pinned: Pinned) -> dict[str, Any]:
    """What belongs in the table of a model: its keys with their values."""
    download = pinned.download
    values = {
        "url": download.url,
        "sha256": download.sha256,
        "data": dict(download.data),
        "license": pinned.license,
    }
    return {key: value for key, value in values.items() if value}


def _with_pins(text: str, pins: Mapping[int, Pinned]) -> str:
    """``text`` with what the tables of ``pins`` lack, beside their locations."""
    expected, lines, places = parse(text), text.split("\n"), Lines(text)
    for index, pinned in pins.items():
        table, values = expected["tool"]["epcontext"]["models"][index], table_of(pinned)
        values = {key: values[key] for key in values if key == "url" or key not in table}
        url, *pairs = (f"{key} = {to_toml(value)}" for key, value in values.items())
        number = (places.of(Key(("models", index)) / "url") or 1) - 1
        line, carriage, _ = lines[number].partition("\r")
        quote = '"' if f'"{table["url"]}"' in line else "'"
        old, new = f"{quote}{table['url']}{quote}", url.removeprefix("url = ")
        if re.match(r"""\s*["']?url\b""", line):
            # The last line of a file may have no end.
            end = "\r\n" if "\r\n" in text else "\n"
            lines[number] = end.join([line.replace(old, new, 1), *pairs]) + carriage
        else:
            # A table in one line.
            lines[number] = line.replace(old, ", ".join([new, *pairs]), 1) + carriage
        table.update(values)
    result = "\n".join(lines)
    if try_parse(result) != expected:
        message = "has a location that cannot be completed, and nothing is written."
        hint = "Write each url on a line of its own, as a plain string."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, FILE, message, hint))
    return result


def pin_location(url: str, downloads: Downloads, hashes: Mapping[str, Any] | None = None) -> Pinned:
    """Pin ``url``, also a link that people copy from a hub's pages, and download its files.

    ``hashes``: the ``sha256`` and ``data`` that are pinned already. Raises DownloadError, and BuildError for
    errors of the system.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or web.HUB
    hub = hub_link(url, endpoint.strip().rstrip("/"))
    if hub is None and (allowed := check_url(url)):
        raise DownloadError(
            f"must be {allowed}.", "Such as hf://org/repo/onnx/model.onnx.", Kind.INVALID_VALUE
        )
    check_allowed(str(hub or url), offline=downloads.offline)
    known: Mapping[str, str | None] = {}
    terms: tuple[str | None, tuple[str, ...]] = None, ()
    if hub is not None:
        hub, known, terms = _ask_hub(hub)
        url = str(hub)
    with downloads.parts(hashlib.sha256(url.encode()).hexdigest()) as parts:
        download = _download(url, known, downloads, hashes or {}, parts)
    return Pinned(download, download.folder(downloads.store.root) / file_of(url), *terms)


def _ask_hub(
    hub: HubFile,
) -> tuple[HubFile, Mapping[str, str | None], tuple[str | None, tuple[str, ...]]]:
    """The file at its commit, the hashes of the repository's large files by name, and its `_license`."""
    try:
        answer = json.loads(web.read(web.hub_url(hub, api=True)))
        large = {str(file["rfilename"]): file.get("lfs") for file in answer["siblings"]}
        known = {name: str(lfs["sha256"]) if lfs else None for name, lfs in large.items()}
        pinned = HubFile(hub.repo, str(answer["sha"]), hub.path)
        is_valid = pinned.is_pinned and all(map(is_sha256, filter(None, known.values())))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        message = f"{web.hub_endpoint()} does not answer as a model hub does."
        raise DownloadError(message, "Check HF_ENDPOINT.")
    if hub.path not in known:
        models = [name for name in known if name.endswith(".onnx")]
        message = f"{hub.repo} has no file {show(hub.path)} at {hub.revision or 'main'}."
        raise DownloadError(message, suggestion(hub.path, models) or "Choose one of its files.")
    return pinned, known, _license(answer.get("cardData"), hub.repo)


def _license(card: Any, repo: str) -> tuple[str | None, tuple[str, ...]]:
    """The license in a model card as an SPDX expression, and warnings about it."""
    values = card if isinstance(card, dict) else {}
    name, page = values.get("license"), f"{web.hub_endpoint()}/{repo}"
    if not isinstance(name, str) or not name:
        return None, (f"{repo} names no license: see {page}, and set license.",)
    if name == "other" and isinstance(values.get("license_name"), str):
        name = values["license_name"]
    try:
        return str(canonicalize_license_expression(name)), ()
    except InvalidLicenseExpression:
        plain = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "other"
        warning = (
            f"{repo} has the license {show(name)}, which is no SPDX license. The wheel redistributes the "
            f"model, or what is compiled from it: read its terms on {page}"
        )
        return f"LicenseRef-{plain}", (warning,)


def _download(
    url: str,
    known: Mapping[str, str | None],
    downloads: Downloads,
    hashes: Mapping[str, Any],
    parts: Path,
) -> Download:
    """Download the model at ``url`` with its external data into the folder ``parts``, and store it.

    ``known``: hashes by the hub's path.
    """
    model = file_of(url)
    digests = {**hashes.get("data", {}), model: hashes.get("sha256")}

    def get(name: str, limit: int) -> None:
        location = beside(url, name)
        if hub := hub_file(location):
            if hub.path not in known:
                message = (
                    f"{hub.repo} has no file {show(hub.path)}, which has weights of the model."
                )
                raise DownloadError(message, "Choose another file.", Kind.EXTERNAL_DATA)
            digests[name] = digests.get(name) or known[hub.path]
        digest = digests.get(name)
        near = _same(digest, downloads.store)
        digests[name] = downloads.get(location, parts / name, digest, limit, near)

    get(model, PROTOBUF_LIMIT)
    try:
        names = external_data(parts / model)
    except ValueError as error:
        message = f"{url} is no ONNX model: {error}.{described(parts / model)}"
        (parts / model).unlink()
        raise DownloadError(message, "Choose another file.", Kind.INVALID_MODEL) from error
    for name in names:
        if not is_portable(name) or name == model:
            message = f"the external data {name!r} of {url} is outside the model's folder."
            raise DownloadError(message, "Choose another file.", Kind.EXTERNAL_DATA)
        get(name, MAX_BYTES)
    download = Download(url, digests[model], {name: digests[name] for name in names})
    downloads.keep(download, parts)
    return download


def _same(digest: str | None, store: Store) -> Iterator[Path]:
    """The files with this hex sha256 of models in the cache."""
    for model in (entry for entry in store.entries() if entry.kind == "models"):
        for name, record in (model.files or {}).items():
            if record.sha256 == digest:
                yield model.folder / "files" / name

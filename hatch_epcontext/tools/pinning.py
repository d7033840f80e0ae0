"""Locations in ``pyproject.toml`` -> their commits, hashes, external data and licenses.

What is downloaded for that stays in the user's cache, where builds find it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from hatch_epcontext.config.location import (
    Download,
    HubFile,
    beside,
    check_url,
    file_of,
    hub_file,
)
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, DownloadError, Key, Kind, Problem
from hatch_epcontext.files import is_portable, is_sha256
from hatch_epcontext.jobs import web
from hatch_epcontext.jobs.downloads import Downloads, described
from hatch_epcontext.package.external_data import external_data
from hatch_epcontext.text import show, suggestion, to_toml

Table = Mapping[str, Any]
"""The table of a model: here ``url``, ``sha256``, ``data`` and ``license``, if it has them."""

_OTHER = "Choose another file."


def pin(text: str, keys: Iterable[Key], downloads: Downloads) -> tuple[str, list[Table]]:
    """``text``, a ``pyproject.toml`` that is valid but for the urls at ``keys``, with these pinned.

    Also the tables of their models. Only commits and missing keys are written. Raises BuildError with the
    problems of all locations that cannot be pinned.
    """
    problems, pins = list[Problem](), dict[int, Table]()
    models = parse(text)["tool"]["epcontext"]["models"]
    for key in keys:
        index = int(key.parts[1])
        table = models[index]
        try:
            pins[index] = pinned = pin_location(table["url"], downloads, table)
        except DownloadError as error:
            problems.append(Problem.at(key, error.kind, str(error), error.hint))
            continue
        data = pinned.get("data", {})
        if table.get("data", data) != data:
            message = "its model has other files of external data than data."
            hint = "Remove data, and run epcontext fetch --pin."
            problems.append(Problem.at(key, Kind.EXTERNAL_DATA, message, hint))
    if problems:
        raise BuildError(*problems)
    return _with_pins(text, pins), [{**models[index], **table} for index, table in pins.items()]


def pinned_line(table: Table) -> str:
    """A line about the pinned table of a model."""
    license_ = table.get("license", "unknown: read its terms, and set license")
    return f"pinned {table['url']} (license: {license_})"


def _with_pins(text: str, pins: Mapping[int, Table]) -> str:
    """``text`` with what the tables of ``pins`` lack."""
    document = tomlkit.parse(text.replace("\r\n", "\n"))
    listed: Any = document["tool"]["epcontext"]["models"]
    for index, pinned in pins.items():
        for key, value in pinned.items():
            if key == "url" or key not in listed[index]:
                listed[index][key] = tomlkit.value(to_toml(value))
    result = tomlkit.dumps(document)
    # A file with the line ends of Windows keeps them.
    return result.replace("\n", "\r\n") if "\r\n" in text else result


def pin_location(url: str, downloads: Downloads, table: Table | None = None) -> Table:
    """The table of a model at ``url``, also a link from a page of the hub, whose files are then in the cache.

    ``table``: what is pinned already. Raises DownloadError, and BuildError for errors of the system.
    """
    if rule := check_url(url):
        hint = "It needs no commit: hf://org/repo/onnx/model.onnx."
        raise DownloadError(f"must be {rule}.", hint, Kind.INVALID_VALUE)
    downloads.check_online(url)
    digests: dict[str, str | None] = {}
    license_ = None
    if hub := hub_file(url):
        hub, digests, license_ = _ask_hub(hub)
        url = str(hub)
    digests.update((table or {}).get("data", {}))
    if table and "sha256" in table:
        digests[file_of(url)] = table["sha256"]
    with downloads.staging() as folder:
        download = _download(url, digests, downloads, folder)
    values = {"sha256": download.sha256, "data": dict(download.data), "license": license_}
    return {"url": url, **{key: value for key, value in values.items() if value}}


def _ask_hub(hub: HubFile) -> tuple[HubFile, dict[str, str | None], str | None]:
    """The file at its commit, the hashes by name of the files in its folder, and the license in SPDX.

    The hub has hashes of large files only: the others are None.
    """
    folder = hub.path[: hub.path.rfind("/") + 1]
    try:
        answer = json.loads(web.read(web.hub_url(hub, api=True), web.hub_token()))
        large = {str(file["rfilename"]): file.get("lfs") for file in answer["siblings"]}
        digests = {path: str(lfs["sha256"]) if lfs else None for path, lfs in large.items()}
        pinned = HubFile(hub.repo, str(answer["sha"]), hub.path)
        name = (answer.get("cardData") or {}).get("license")
        is_valid = pinned.is_pinned and all(map(is_sha256, filter(None, digests.values())))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        message = f"{web.hub_endpoint()} does not answer as a model hub does."
        raise DownloadError(message, "Check HF_ENDPOINT.")
    if hub.path not in digests:
        models = [path for path in digests if path.endswith(".onnx")]
        message = f"{hub.repo} has no file {show(hub.path)} at {hub.revision or 'main'}."
        raise DownloadError(message, suggestion(hub.path, models) or "Choose one of its files.")
    license_ = None
    with contextlib.suppress(InvalidLicenseExpression):
        license_ = str(canonicalize_license_expression(str(name)))
    known = {path: digest for path, digest in digests.items() if path.startswith(folder)}
    return pinned, {path.removeprefix(folder): digest for path, digest in known.items()}, license_


def _download(
    url: str, digests: dict[str, str | None], downloads: Downloads, folder: Path
) -> Download:
    """Download the model at ``url`` with its external data into ``folder``, and store it.

    ``digests``: the known hashes by name.
    """

    def get(name: str) -> str:
        return downloads.get(beside(url, name), folder / name, digests.get(name))

    model = file_of(url)
    sha256 = get(model)
    try:
        names = external_data(folder / model)
    except ValueError as error:
        message = f"{url} is no ONNX model: {error}.{described(folder / model)}"
        raise DownloadError(message, _OTHER, Kind.INVALID_MODEL) from error
    for name in names:
        if not is_portable(name) or name == model:
            message = f"the external data {name!r} of {url} is outside the model's folder."
            raise DownloadError(message, _OTHER, Kind.EXTERNAL_DATA)
    download = Download(url, sha256, {name: get(name) for name in names})
    downloads.keep(download, folder)
    return download

"""Pins a model from elsewhere: its commit, the hashes of its files, and its license."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from hatch_epcontext.config.location import Download, HubFile, beside, check_url, file_of, hub_file
from hatch_epcontext.errors import DownloadError, Kind
from hatch_epcontext.files import is_portable, is_sha256
from hatch_epcontext.package.external_data import external_data
from hatch_epcontext.remote import web
from hatch_epcontext.remote.downloads import Downloads
from hatch_epcontext.text import show, suggestion

Table = Mapping[str, Any]
"""The table of a model: here ``url``, ``sha256``, ``data`` and ``license``, if it has them."""

_OTHER = "Choose another file."


def as_if_pinned(table: Table) -> Table:
    """The ``table`` of a model with a commit and a hash of zeros where it has none."""
    hub = hub_file(table["url"])
    url = str(replace(hub, revision="0" * 40)) if hub else table["url"]
    return {"sha256": "0" * 64, **table, "url": url}


def pinned_line(table: Table) -> str:
    """A line about the pinned table of a model."""
    license_ = table.get("license", "unknown: read its terms, and set license")
    return f"pinned {table['url']} (license: {license_})"


def check_location(url: str, downloads: Downloads) -> None:
    """Raise DownloadError if ``url`` is no location of a model, or if the environment forbids downloads."""
    if rule := check_url(url):
        hint = "It needs no commit: hf://org/repo/onnx/model.onnx."
        raise DownloadError(f"must be {rule}.", hint, Kind.INVALID_VALUE)
    downloads.check_online(url)


def pin_location(url: str, downloads: Downloads, table: Table | None = None) -> Table:
    """The table of a model at ``url``, also a link from a page of the hub, whose files are then in the cache.

    ``url`` is a valid location; ``table``: what is pinned already. Raises DownloadError, and BuildError for
    errors of the system.
    """
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
        answer = json.loads(web.read(web.hub_url(hub, api=True), web.hub_token()).content)
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
        message = f"{url} is no ONNX model: {error}."
        raise DownloadError(message, _OTHER, Kind.INVALID_MODEL) from error
    for name in names:
        if not is_portable(name) or name == model:
            message = f"the external data {name!r} of {url} is outside the model's folder."
            raise DownloadError(message, _OTHER, Kind.EXTERNAL_DATA)
    download = Download(url, sha256, {name: get(name) for name in names})
    downloads.keep(download, folder)
    return download

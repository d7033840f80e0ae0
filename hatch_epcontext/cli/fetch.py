"""``epcontext fetch``: downloads models before builds without a network, and pins them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import tomlkit
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from hatch_epcontext.cli._common import echo, existing_folder, log, open_store
from hatch_epcontext.cli._settings import use_lines
from hatch_epcontext.config.environ import PREFIX, environment_or_error
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import (
    Download,
    HubFile,
    beside,
    check_url,
    file_of,
    hub_file,
)
from hatch_epcontext.config.pyproject import FILE, tool_table
from hatch_epcontext.errors import BuildError, ConfigError, DownloadError, Key, Kind, Problem
from hatch_epcontext.files import is_portable, is_sha256, write_atomically
from hatch_epcontext.jobs import web
from hatch_epcontext.jobs.downloads import Downloads, download_models
from hatch_epcontext.package.external_data import external_data
from hatch_epcontext.system import check_folder
from hatch_epcontext.text import count, show, suggestion, to_toml

Table = Mapping[str, Any]
"""The table of a model: here ``url``, ``sha256``, ``data`` and ``license``, if it has them."""

_OTHER = "Choose another file."


@click.command("fetch")
@click.argument("project", type=existing_folder, default=Path())
@click.option("--pin", "pins", is_flag=True, help="First write the hashes that are missing.")
def command(project: Path, pins: bool) -> None:
    """Download the models from elsewhere into the user's cache.

    Builds of PROJECT, also of an unpacked sdist, then need no network.

    --pin writes the commit, sha256, data and license of each url that lacks a hash into pyproject.toml. A
    url may be a link from a page of the model hub.
    """
    root = project.absolute()
    use_lines(project)
    store = open_store()
    environ = {**os.environ, f"{PREFIX}CACHE_DIR": str(store.root)}
    # Other files may be missing: hooks may make them.
    read = partial(load, root, hook_table={}, environ=environ, pending=True)
    try:
        config = read(tool_table(root))
    except ConfigError as error:
        keys = [problem.key for problem in error.problems if problem.kind is Kind.NOT_PINNED]
        if not pins or len(keys) < len(error.problems):
            raise
        # What pinning cannot mend is an error before the download.
        read(_as_if_pinned(tool_table(root), [*filter(None, keys)]))
        check_folder((root / FILE).resolve().parent)
        _pin(
            root / FILE,
            [*filter(None, keys)],
            Downloads(store, log, offline=environment_or_error().offline),
        )
        config = read(tool_table(root))
    else:
        if pins:
            echo("all models from elsewhere are pinned")
    download_models(config.models, config, log)
    paths = {model.path for model in config.models if model.download}
    echo(f"{count(len(paths), 'model')} from elsewhere in {store.root}")


def _as_if_pinned(table: Table, keys: Sequence[Key]) -> Table:
    """The configuration ``table`` with pins for the models that have urls at ``keys``."""
    models = list(table["models"])
    for key in keys:
        index: Any = key.parts[1]
        models[index] = as_if_pinned(models[index])
    return {**table, "models": models}


def as_if_pinned(table: Table) -> Table:
    """The ``table`` of a model with a commit and a hash of zeros where it has none."""
    hub = hub_file(table["url"])
    url = str(replace(hub, revision="0" * 40)) if hub else table["url"]
    return {"sha256": "0" * 64, **table, "url": url}


def _pin(file: Path, keys: Sequence[Key], downloads: Downloads) -> None:
    """Write commits, and keys that are missing, beside the urls at ``keys`` in a ``pyproject.toml``.

    Raises BuildError with the problems of all locations that cannot be pinned, and ConfigError if the file
    is changed meanwhile.
    """
    before = file.read_bytes()
    text = before.decode()
    document = tomlkit.parse(text.replace("\r\n", "\n"))
    listed: Any = document["tool"]["epcontext"]["models"]
    tables = [listed[key.parts[1]] for key in keys]
    problems = list[Problem]()
    for key, table in zip(keys, tables, strict=True):
        try:
            pinned = pin_location(table["url"], downloads, table.unwrap())
        except DownloadError as error:
            problems.append(Problem.at(key, error.kind, str(error), error.hint))
            continue
        data = pinned.get("data", {})
        if table.get("data", data) != data:
            message = "its model has other files of external data than data."
            hint = "Remove data, and run epcontext fetch --pin."
            problems.append(Problem.at(key, Kind.EXTERNAL_DATA, message, hint))
        for name, value in pinned.items():
            if name == "url" or name not in table:
                table[name] = tomlkit.value(to_toml(value))
    if problems:
        raise BuildError(*problems)
    if file.read_bytes() != before:
        message = "was changed meanwhile, and nothing is written."
        hint = "Run epcontext fetch --pin again."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message, hint))
    result = tomlkit.dumps(document)
    # A file with the line ends of Windows keeps them, and a link stays a link.
    text = result.replace("\n", "\r\n") if "\r\n" in text else result
    write_atomically(file.resolve(), text)
    for table in tables:
        echo(pinned_line(table))


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

"""Cuts models and writes their constants into them, and keeps the results in the user's cache."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hatch_epcontext
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.files import FileRecord, is_portable, link_or_copy, mark_used, record_file
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.cache.fingerprint import FORMAT, value_sha256
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.system import writing
from hatch_epcontext.worker.results import CutResult

FOLDER = "cut"
"""The folder of the cache's layout with these models, below the hex sha256 of all that they depend on."""


@dataclass(frozen=True)
class _EarlierCut:
    """A cut model of an earlier build: its files, the hex sha256 of each file of the external data of the
    whole model, and what each form fixes.
    """

    files: Mapping[str, FileRecord]
    data: Mapping[str, str]
    forms: tuple[CutResult, ...]


def cut_plan(made: Plan, index: Index, workers: Workers, staging: Path) -> Plan:
    """The plan with all models as the configuration changes them; see `cut_models`."""
    if not any(model.is_changed for model in made.config.models):
        return made
    check_environment(made.local_targets, made.requirements)
    return plan(cut_models(made.config, index, workers, staging))


def cut_models(config: Config, index: Index, workers: Workers, staging: Path) -> Config:
    """``config`` with the paths of cut models, and of those with their constants in them, below ``staging``,
    and with those keys that still fit them.

    A worker writes a model, unless ``index`` has the result of an earlier build. Raises ModelError when a
    model cannot be cut or a constant does not fit, and RequirementError when nothing can read the model.
    """
    groups: dict[tuple[Any, ...], list[Model]] = {}
    for model in config.models:
        if model.is_changed:
            group = model.path, model.cut, value_sha256(to_plain(model.constants))
            groups.setdefault(group, []).append(model)
    done: dict[str, Model] = {}
    for number, forms in enumerate(groups.values()):
        folder = staging / "cut" / str(number)
        done |= _Cutting(index, workers, folder).models(forms)
    return dataclasses.replace(
        config, models=tuple(done.get(model.name, model) for model in config.models)
    )


@dataclass(frozen=True)
class _Cutting:
    """Cuts one model, in all its forms, into ``folder``."""

    index: Index
    workers: Workers
    folder: Path

    def models(self, forms: Sequence[Model]) -> dict[str, Model]:
        """The models ``forms`` by name, cut."""
        first = forms[0]
        key = self._key(forms)
        with writing("a cut model", self.folder):
            (self.folder / "model").mkdir(parents=True)
        known = self._taken(first, key)
        if known is None:
            check_environment((), INSPECTION)
            known = self._made(forms)
            self._keep(key, known)
        path = self.folder / "model" / first.path.name
        return {
            model.name: dataclasses.replace(
                model,
                path=path,
                dims=fixed.dims,
                shapes=fixed.shapes,
                constants={},
                origin=model.path,
            )
            for model, fixed in zip(forms, known.forms, strict=True)
        }

    def _key(self, forms: Sequence[Model]) -> str:
        fixed = [to_plain([model.dims, model.shapes, model.constants]) for model in forms]
        return value_sha256(
            {
                "version": [hatch_epcontext.__version__, FORMAT],
                "sha256": self.index.sha256(forms[0].path),
                "name": forms[0].path.name,
                "cut": to_plain(forms[0].cut),
                "forms": fixed,
            }
        )

    def _taken(self, model: Model, key: str) -> _EarlierCut | None:
        """The cut model that an earlier build made of the same files, linked into the folder."""
        kept = self._kept(key)
        known = self.index.facts(key, _EarlierCut)
        if kept is None or known is None or not all(map(is_portable, (*known.files, *known.data))):
            return None
        if not all(self.index.is_intact(kept / name, each) for name, each in known.files.items()):
            return None
        try:
            same = all(
                self.index.sha256(model.path.parent / name) == digest
                for name, digest in known.data.items()
            )
            for name in known.files if same else ():
                link_or_copy(kept / name, self.folder / "model" / name)
        except OSError:
            return None
        mark_used(kept)
        return known if same else None

    def _made(self, forms: Sequence[Model]) -> _EarlierCut:
        # Imported here: a build that has its models in the index makes no requests.
        from hatch_epcontext.worker.requests import CutRequest

        first = forms[0]
        folder = self.folder / "model"
        shutil.rmtree(folder)
        folder.mkdir()
        request = CutRequest(tuple(forms), str(folder))
        reply = self.workers.call(request, self.folder / "call", location=f"{first.name}: cutting")
        # The files that were cut must be those that were hashed.
        self.index.check(first.path)
        data = {name: self.index.sha256(first.path.parent / name) for name in reply.data}
        records = {name: record_file(folder / name) for name in reply.files}
        return _EarlierCut(records, data, reply.forms)

    def _keep(self, key: str, known: _EarlierCut) -> None:
        kept = self._kept(key)
        if kept is None:
            return
        # A cache that cannot be written is no error; other builds may write the same.
        with contextlib.suppress(OSError):
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            for name in known.files:
                link_or_copy(self.folder / "model" / name, kept / name)
            self.index.store_facts(key, known)

    def _kept(self, key: str) -> Path | None:
        """The folder for the cut model in the user's cache, if there is one."""
        return None if self.index.folder is None else self.index.folder.with_name(FOLDER) / key

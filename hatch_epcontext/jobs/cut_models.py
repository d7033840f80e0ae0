"""Cuts models and writes their constants into them, and keeps the results in the user's cache."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hatch_epcontext
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.files import FileRecord, is_regular, record_file
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.fingerprint import FORMAT, value_sha256
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.system import writing
from hatch_epcontext.worker.results import CutResult


@dataclass(frozen=True)
class _CutModel:
    """A cut model: its files, the hex sha256 of each file of the external data of the whole model, and what
    each form fixes.
    """

    files: Mapping[str, FileRecord]
    data: Mapping[str, str]
    forms: tuple[CutResult, ...]


def cut_plan(whole: Plan, cache: Cache, workers: Workers, staging: Path) -> Plan:
    """The plan with all models as the configuration changes them; see `cut_models`."""
    if not any(model.is_changed for model in whole.config.models):
        return whole
    check_environment(whole.local_targets, whole.requirements)
    return plan(cut_models(whole.config, cache, workers, staging))


def cut_models(config: Config, cache: Cache, workers: Workers, staging: Path) -> Config:
    """``config`` with the paths of cut models, and of those with their constants in them, below ``staging``,
    and with those keys that still fit them.

    A worker writes a model, unless ``cache`` has the result of an earlier build. Raises ModelError when a
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
        done |= _Cutting(cache, workers, folder).models(forms)
    models = tuple(done.get(model.name, model) for model in config.models)
    return dataclasses.replace(config, models=models)


@dataclass(frozen=True)
class _Cutting:
    """Cuts one model, in all its forms, into ``folder``."""

    cache: Cache
    workers: Workers
    folder: Path

    def models(self, forms: Sequence[Model]) -> dict[str, Model]:
        """The models ``forms`` by name, cut."""
        first, folder = forms[0], self.folder / "model"
        key = self._key(forms)
        cut = self.cache.get("cut", key, _CutModel, folder)
        if cut is None or not self._is_current(cut, first):
            check_environment((), INSPECTION)
            shutil.rmtree(folder, ignore_errors=True)
            with writing("a cut model", self.folder):
                folder.mkdir(parents=True)
            cut = self._cut(forms, folder)
            self.cache.put("cut", key, cut, folder)
        return {
            model.name: dataclasses.replace(
                model,
                path=folder / first.path.name,
                dims=fixed.dims,
                shapes=fixed.shapes,
                constants={},
                origin=model.path,
            )
            for model, fixed in zip(forms, cut.forms, strict=True)
        }

    def _key(self, forms: Sequence[Model]) -> str:
        return value_sha256(
            {
                "version": [hatch_epcontext.__version__, FORMAT],
                "sha256": self.cache.index.sha256(forms[0].path),
                "name": forms[0].path.name,
                "cut": to_plain(forms[0].cut),
                "forms": [to_plain([m.dims, m.shapes, m.constants]) for m in forms],
            }
        )

    def _is_current(self, cut: _CutModel, model: Model) -> bool:
        """Whether the external data of ``model`` is what it was when it was cut."""
        files = {model.path.parent / name: sha256 for name, sha256 in cut.data.items()}
        return all(
            is_regular(file) and self.cache.index.sha256(file) == sha256
            for file, sha256 in files.items()
        )

    def _cut(self, forms: Sequence[Model], folder: Path) -> _CutModel:
        # Imported here: a build that has its models in the cache makes no requests.
        from hatch_epcontext.worker.requests import CutRequest

        source, name, index = forms[0].path, forms[0].name, self.cache.index
        request = CutRequest(tuple(forms), str(folder))
        reply = self.workers.call(request, self.folder / "call", location=f"{name}: cutting")
        # The files that were cut must be those that were hashed.
        index.check(source)
        data = {name: index.sha256(source.parent / name) for name in reply.data}
        files = {name: record_file(folder / name) for name in reply.files}
        return _CutModel(files, data, reply.forms)

"""The identities by which a build finds what earlier ones learnt of a job.

Each is a hex sha256, but for the `Terms`, which have one for each model. ``docs/architecture.md`` says what a
miss of each means, and which other identities there are.

In the cache ``searches`` are found by the search key, ``artifacts`` by their own, and ``refs``, the keys of
the latest artifacts, by only the fingerprint, for builds that only read the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hatch_epcontext.cache.build import Index
from hatch_epcontext.config.settings import Model
from hatch_epcontext.jobs.plan import CACHE_FORMAT, Job
from hatch_epcontext.jobs.recipe import Recipe
from hatch_epcontext.jobs.search import Terms
from hatch_epcontext.jobs.sources import inputs_digest
from hatch_epcontext.serialize import value_sha256

if TYPE_CHECKING:
    from hatch_epcontext.jobs.steps import Build


def fingerprint(build: Build, job: Job) -> str:
    """What ``job`` compiles to, with any versions: see `Job.fingerprint`."""
    calibration = job.target.calibration
    digest = calibration and inputs_digest(calibration, build.cache.index)
    return job.fingerprint([build.sources[model.name].sha256 for model in job.models], digest)


def search_key(fingerprint: str, versions: Mapping[str, str]) -> str:
    """The search for a recipe, with these ``versions`` of ONNX Runtime and the EP's packages."""
    return value_sha256([fingerprint, versions])


def artifact_key(search: str, recipe: Recipe) -> str:
    """What ``recipe`` makes in the search with that key."""
    return value_sha256([search, recipe])


def terms_of(build: Build, job: Job) -> Terms:
    """What ``job`` requires of a winner."""
    index = build.cache.index
    comparisons = {model.name: comparison_key(job, model, index) for model in job.models}
    return Terms(job.target.min_coverage, comparisons)


def comparison_key(job: Job, model: Model, index: Index) -> str:
    """How results of ``model`` are compared: its inputs, the limits, and the options of the session."""
    inputs = inputs_digest(model.validate.inputs, index)
    tolerance, options = model.tolerance_for(job.target), job.target.load_options
    validate = model.validate
    settings = (model.is_compared, tolerance, validate.states, validate.ranges, options)
    return value_sha256([CACHE_FORMAT, model.name, inputs, *settings])

"""How the models of a job are validated: by running them, or the reason why not."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_epcontext.build.artifact import Artifact, Record, Validation, ValidationStatus
from hatch_epcontext.build.fingerprint import FORMAT, value_sha256
from hatch_epcontext.build.index import Index
from hatch_epcontext.build.plan import Job
from hatch_epcontext.config.settings import CompileSettings, Model, ValidateSettings
from hatch_epcontext.errors import BuildError, Kind, Problem, Setting
from hatch_epcontext.ipc.facts import Agreement
from hatch_epcontext.providers import Provider

if TYPE_CHECKING:
    from hatch_epcontext.ipc.protocol import ValidateReply


def describe_validation(validation: Validation) -> str:
    """The validation for a summary."""
    reason = f" ({validation.reason})" if validation.reason else ""
    if validation.status is ValidationStatus.NOT_VALIDATED:
        return "NOT validated (validate = false)"
    if validation.status is ValidationStatus.STRUCTURE:
        return f"structure checked, NOT run{reason}"
    ran = {
        ValidationStatus.RAN: "ran",
        ValidationStatus.RAN_ON_CPU: f"ran on the CPU only{reason}",
        ValidationStatus.RAN_ALONE: f"structure checked{reason}; compiled separately, it ran",
    }[validation.status]
    if not validation.agreements:
        return f"{ran}, outputs finite, not compared"
    largest = max(agreement.max_abs for agreement in validation.agreements)
    cosine = f"cosine {validation.cosine:.5f}, " if validation.cosine is not None else ""
    return f"{ran} and agrees with the CPU ({cosine}largest difference {largest:.2g})"


def validation_key(job: Job, model: Model, record: Record, index: Index) -> str:
    """What identifies the validation of a model: the artifact's files, inputs, tolerance and options."""
    tolerance = model.tolerance_for(job.target.provider)
    return value_sha256(
        {
            "format": FORMAT,
            "model": model.name,
            "files": {name: file.sha256 for name, file in record.files.items()},
            "inputs": inputs_digest(model.validate.inputs, index),
            "tolerance": asdict(tolerance) if tolerance else None,
            "load_options": job.target.load_options,
        }
    )


def inputs_digest(inputs: str, index: Index) -> str:
    """What identifies the dummy inputs of a model: the contents of their files, or their name."""
    path = Path(inputs)
    if path.is_file():
        return index.sha256(path)
    if path.is_dir():
        files = input_files(inputs)
        return value_sha256(
            {each.relative_to(path).as_posix(): index.sha256(each) for each in files}
        )
    return inputs


def input_files(inputs: str) -> list[Path]:
    """The files of the dummy inputs of a model; empty for synthetic ones."""
    path = Path(inputs)
    if path.is_file():
        return [path]
    return [each for each in sorted(path.rglob("*")) if each.is_file()] if path.is_dir() else []


def validation_without_run(job: Job, model: Model, reason: str | None) -> Validation | None:
    """The validation of a model that must not be run, or cannot be run for ``reason``; else None."""
    mode = model.validate.mode
    if mode is False:
        return Validation(ValidationStatus.NOT_VALIDATED)
    if mode == "structure":
        return Validation(ValidationStatus.STRUCTURE, reason='validate = "structure"')
    if reason is None:
        return None
    if mode == "require" and not job.target.from_cache:
        raise not_run_error(job, model, reason)
    return Validation(ValidationStatus.STRUCTURE, reason=reason)


def reason_not_to_run(job: Job) -> str | None:
    """Why the job's result cannot be run on this machine, if that is known without asking the EP."""
    return reason_not_to_run_here(job.target.provider, job.target.settings)


def reason_not_to_run_here(provider: Provider, settings: CompileSettings) -> str | None:
    """Why what ``provider`` compiled cannot be run on this machine, if that is known without the EP."""
    if settings.virtual_devices:
        return f"{provider.ep} compiled for a virtual device"
    if provider.runs_on(sys.platform, platform.machine()):
        return None
    machine = f"({sys.platform}, {platform.machine()})"
    return f"{provider.ep} cannot run its contexts on this machine {machine}"


def validation_from_reply(artifact: Artifact, reply: ValidateReply) -> Validation:
    """The validation of ``artifact`` by a worker."""
    if reply.unavailable is None:
        return Validation(ValidationStatus.RAN, reply.agreements)
    optimized = artifact.record.product == "optimized"
    status = ValidationStatus.RAN_ON_CPU if optimized else ValidationStatus.STRUCTURE
    return Validation(status, reply.agreements, reply.unavailable)


def reason_not_to_open(job: Job) -> str | None:
    """Why no simulator can open the job's result; None unless it needs the EP's own device."""
    if not job.needs_device:
        return None
    shared = job.group is not None and not job.target.provider.loads_shared
    kind = " for several chips" if job.has_several_chips else ""
    kind += " that share weights" if shared else ""
    return f"{job.target.provider.ep} cannot open contexts{kind} on this machine"


def validation_of_alone(job: Job, model: Model, alone: Sequence[Validation]) -> Validation:
    """The validation of a context that cannot be opened on this machine; see `Job.needs_device`.

    ``alone``: the validations of the same model compiled without the others, one for each chip.
    """
    if not model.validate.mode:
        return Validation(ValidationStatus.NOT_VALIDATED)
    reason = reason_not_to_open(job)
    assert reason is not None, "only such a job is compiled alone"
    if model.validate.mode == "require":
        raise not_run_error(job, model, reason)
    not_run = next((each for each in alone if each.status is not ValidationStatus.RAN), None)
    return not_run or Validation(ValidationStatus.RAN_ALONE, _worst(alone), reason)


def _worst(validations: Sequence[Validation]) -> tuple[Agreement, ...]:
    """For each output the largest difference and the smallest cosine of all validations."""
    by_output: dict[str, list[Agreement]] = {}
    for each in validations:
        for agreement in each.agreements:
            by_output.setdefault(agreement.output, []).append(agreement)
    return tuple(
        Agreement(
            output,
            max(each.max_abs for each in same),
            min((each.cosine for each in same if each.cosine is not None), default=None),
        )
        for output, same in by_output.items()
    )


def not_run_error(job: Job, model: Model, reason: str) -> BuildError:
    """The error for a model that must be run, and cannot be."""
    validate = model.key / "validate"
    only_mode = dataclasses.replace(model.validate, mode="auto") == ValidateSettings()
    return BuildError(
        Problem(
            Kind.NOT_RUN,
            f"{job.location}: validation",
            f'{reason.rstrip(".")}, and validate is "require".',
            "Build on another machine, or check only what this one can:",
            settings=(Setting(validate if only_mode else validate / "mode", "auto"),),
        )
    )

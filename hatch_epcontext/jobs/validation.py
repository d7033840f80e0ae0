"""How the models of a job are validated: by running them, or the reason why not."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import BuildError, Kind, Problem, Setting, UnavailableError
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.cache.build import Index
from hatch_epcontext.jobs.plan import FORMAT, Job
from hatch_epcontext.providers import QUANTIZED, Provider
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import (
    NOTHING,
    Emulation,
    Validation,
    ValidationStatus,
)


def describe_validation(validation: Validation, *, with_reason: bool = True) -> str:
    """The validation in a few words; the report has the numbers. In tables there is no place for a reason."""
    reason = f" ({validation.reason})" if validation.reason and with_reason else ""
    if validation.status is ValidationStatus.NOT_VALIDATED:
        return "NOT validated (validate = false)"
    if validation.status is ValidationStatus.STRUCTURE:
        return f"structure checked, NOT run{reason}"
    snr = validation.snr if validation.simulated or validation.emulation else None
    decibels = "" if snr is None else f" ({snr:.0f} dB)"
    but = "" if validation.differs else ", NOT compared"
    parts = [f"ran{but}{reason if validation.status is ValidationStatus.RAN else ''}"]
    if validation.compared:
        number = count(len(validation.samples), "given input")
        reference = "" if validation.float_form is None else " with its float form"
        but = ", but is SENSITIVE" if validation.sensitive else ""
        on = "synthetic inputs" if validation.synthetic else number
        parts = [f"agrees{reference} on {on}{but}{'' if validation.simulated else decibels}"]
    others = [a.status.value for a in validation.agreements if a not in validation.compared]
    parts += (f"{count(n, 'output')} {status}" for status, n in Counter(others).items())
    if validation.status is ValidationStatus.RAN_ON_CPU:
        parts.append(f"on the CPU only{reason}")
    if validation.status is ValidationStatus.RAN_ALONE:
        parts.append("compiled alone")
    if validation.simulated:
        parts.append(f"simulator{decibels}")
    return ", ".join(parts)


def describe_emulation(emulation: Emulation) -> str:
    """What the number format of the EP makes of the model, for a summary."""
    if not emulation.samples:
        needs = "that needs a build, fixed shapes and less than 1 GB of weights"
        return f"{emulation.format} NOT emulated ({needs})"
    ratio = emulation.nearest and emulation.nearest.snr
    snr = "equal" if ratio is None else f"at least {ratio:.0f} dB"
    if ratio == NOTHING:
        snr = "no numbers"
    return f"{emulation.format} emulated on {count(emulation.samples, 'input')}, {snr}"


def validation_warnings(name: str, validation: Validation) -> Iterator[str]:
    """What the validation of the model ``name`` leaves open, in lines."""
    where = "(validate.inputs, or --inputs on the command line)"
    for agreement in validation.inconclusive:
        hint = f"; give real inputs {where}" if validation.synthetic else ""
        reason = f"is inconclusive, because {agreement.reason}{hint}"
        yield f"{name}: the comparison of the output {agreement.output!r} {reason}"
    integers = validation.float_form
    if integers is not None and integers.snr is not None and integers.snr < QUANTIZED.snr:
        yield (
            f"{name}: it agrees with its float form, and the int8 file on the CPU differs from it by "
            f"{integers.snr:.0f} dB, because its quantization is coarse; compare the answers of both "
            "in the app"
        )
    yield from (f"{name}: {warning}" for warning in validation.warnings)
    emulation = validation.emulation
    reasons = [agreement.reason for agreement in validation.compared if agreement.reason]
    if emulation is not None and emulation.reason and not reasons:
        # The number format was not measured, so this only warns.
        reasons = [emulation.reason]
    real = f"; compare with real ones {where}"
    for reason in dict.fromkeys(reasons):
        if any(other != reason and other.startswith(reason) for other in reasons):
            # Another output has this reason too, with the node that is the cause.
            continue
        hint = real if validation.synthetic else ""
        yield f"{name}: other inputs may give wrong answers: {reason}{hint}"


def check_conclusive(job: Job, model: Model, validation: Validation) -> None:
    """Raise BuildError if the validation of ``model`` is required, and its comparison is inconclusive."""
    if not validation.inconclusive or model.validate.mode != "require":
        return
    raise BuildError(
        *(
            Problem(
                Kind.INCONCLUSIVE,
                "",
                f"the comparison of the output {agreement.output!r} is inconclusive, because "
                f"{agreement.reason}, and "
                'validate is "require".',
                "Give real inputs:",
                settings=(Setting(model.key / "validate" / "inputs", "samples.npz"),),
                step="validation",
            )
            for agreement in validation.inconclusive
        )
    )


def validation_key(job: Job, model: Model, files: Mapping[str, FileRecord], index: Index) -> str:
    """What identifies the validation of ``model`` in an artifact with these ``files``."""
    return value_sha256(
        [
            *(FORMAT, model.name, inputs_digest(model.validate.inputs, index)),
            *(model.tolerance_for(job.target), model.validate.states, job.target.load_options),
            {name: file.sha256 for name, file in files.items()},
        ]
    )


def inputs_digest(inputs: str, index: Index) -> str:
    """What identifies the dummy inputs of a model: the contents of their files, or their name."""
    if inputs in SYNTHETIC:
        return inputs
    path = Path(inputs)
    if path.is_file():
        return index.sha256(path)
    if path.is_dir():
        files = input_files(inputs)
        return value_sha256(
            {file.relative_to(path).as_posix(): index.sha256(file) for file in files}
        )
    return inputs


def input_files(inputs: str) -> list[Path]:
    """The files of the dummy inputs of a model; empty for synthetic ones."""
    if inputs in SYNTHETIC:
        return []
    path = Path(inputs)
    if path.is_file():
        return [path]
    return [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else []


def validation_without_run(
    job: Job, model: Model, stored: Validation | None = None
) -> Validation | None:
    """The validation of ``model`` if it must not be run, cannot be run here, or has a ``stored`` one."""
    from_cache, mode = job.target.from_cache, model.validate.mode
    if stored is not None and from_cache:
        return stored
    if mode is False:
        return Validation(ValidationStatus.NOT_VALIDATED)
    if mode == "structure":
        return Validation(ValidationStatus.STRUCTURE, reason='validate = "structure"')
    if reason := reason_not_to_run(job.target.provider):
        if mode == "require" and not from_cache:
            raise not_run_error(job, model, reason)
        return Validation(ValidationStatus.STRUCTURE, reason=reason)
    # If it was not run, the EP's device may be here now.
    alone = () if mode == "require" else (ValidationStatus.RAN_ALONE,)
    return stored if stored and stored.status in (ValidationStatus.RAN, *alone) else None


def reason_not_to_run(provider: Provider) -> str | None:
    """Why artifacts of ``provider`` cannot be run on this machine, if that is known without the EP."""
    if provider.runs_on(sys.platform, platform.machine()):
        return None
    machine = f"({sys.platform}, {platform.machine()})"
    return f"{provider.ep} cannot run its contexts on this machine {machine}"


def validation_of_alone(job: Job, model: Model, alone: Sequence[Validation]) -> Validation:
    """The validation of a context that this machine cannot open; see `Job.reason_not_to_open`.

    ``alone``: the validations of the same model compiled alone, one for each chip.
    """
    reason = job.reason_not_to_open
    if model.validate.mode == "require":
        raise not_run_error(job, model, reason)
    worst = min(alone, key=lambda v: (v.status is ValidationStatus.RAN, not v.sensitive, v.margin))
    if worst.status is not ValidationStatus.RAN:
        return worst
    # The session was one of the file that was compiled alone.
    status = ValidationStatus.RAN_ALONE
    return dataclasses.replace(worst, status=status, reason=reason, load=None, day="")


def not_run_error(job: Job, model: Model, reason: str) -> BuildError:
    """The error for a model that must be run but cannot be."""
    validate = model.key / "validate"
    only_mode = dataclasses.replace(model.validate, mode="auto") == ValidateTable()
    return UnavailableError(
        Problem(
            Kind.NOT_RUN,
            "",
            f'{reason.rstrip(".")}, and validate is "require".',
            "Build on another machine, or check only what this one can:",
            settings=(Setting(validate if only_mode else validate / "mode", "auto"),),
            step="validation",
        )
    )

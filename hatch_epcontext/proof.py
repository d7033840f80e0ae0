"""How the models of a job are proven: by running them, or why not."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from pathlib import Path

from hatch_epcontext.artifact import Artifact, Proof, record_files
from hatch_epcontext.config import Model
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.fingerprint import FORMAT, file_sha256, value_sha256
from hatch_epcontext.plan import Job
from hatch_epcontext.protocol import ValidateReply


def proof_key(job: Job, model: Model) -> str:
    """What identifies the proof of a model, beside its artifact: inputs, tolerance, options."""
    tolerance = model.tolerance_for(job.target.provider)
    return value_sha256(
        {
            "format": FORMAT,
            "model": model.name,
            "inputs": _inputs_digest(model.inputs),
            "tolerance": asdict(tolerance) if tolerance else None,
            "load_options": job.target.load_options,
        }
    )


def _inputs_digest(inputs: str) -> str:
    path = Path(inputs)
    if path.is_file():
        return file_sha256(path)
    if path.is_dir():
        return value_sha256({name: file.sha256 for name, file in record_files(path).items()})
    return inputs


def without_running(job: Job, model: Model) -> Proof | None:
    """The proof of a model that is not to be run, or cannot be; None if it can."""
    if model.validate is False:
        return Proof("none")
    if model.validate == "structure":
        return Proof("structure", why='validate = "structure"')
    if not (why := cannot(job)):
        return None
    if model.validate == "require" and not job.target.from_cache:
        raise cannot_run(job, model, why)
    return Proof("structure", why=why)


def cannot(job: Job) -> str:
    """Why the job's result cannot be run here, as far as that is known without asking the EP."""
    target = job.target
    if target.virtual_devices:
        return f"{target.provider.ep} compiled for a virtual device"
    if target.provider.runs_on(sys.platform, platform.machine()):
        return ""
    here = f"({sys.platform}, {platform.machine()})"
    return f"{target.provider.ep} cannot run its contexts on this machine {here}"


def proof_of(artifact: Artifact, reply: ValidateReply) -> Proof:
    """What a worker's validation of ``artifact`` proves."""
    if not reply.absent:
        return Proof("run", reply.agreements)
    how = "cpu" if artifact.record.product == "optimized" else "structure"
    return Proof(how, reply.agreements, reply.absent)


def proof_alone(job: Job, model: Model, proof: Proof) -> Proof:
    """The proof of a context that shares weights, where such contexts cannot be opened.

    ``proof`` is that of the same model as it is compiled alone.
    """
    if proof.how == "none" or not model.validate:
        return proof
    why = f"{job.target.provider.ep} cannot open contexts that share weights here"
    if model.validate == "require":
        raise cannot_run(job, model, why)
    if proof.how != "run":
        return proof
    return Proof("alone", proof.agreements, why)


def cannot_run(job: Job, model: Model, why: str) -> BuildError:
    """The error of a model that has to be run, and cannot be."""
    return BuildError(
        Problem(
            f"{job.where}: validation",
            f'{why.rstrip(".")}, and validate is "require".',
            f'Build elsewhere, or take "auto" in {model.key}.validate, which checks what it can.',
        )
    )

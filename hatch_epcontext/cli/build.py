"""``epcontext build``: builds the models of a project, without a wheel."""

from __future__ import annotations

from pathlib import Path

import click

from hatch_epcontext.cli import _common, _settings
from hatch_epcontext.errors import RequirementError
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import begin, open_cache
from hatch_epcontext.text import hide_credentials
from hatch_epcontext.tools.project import Project


@click.command("build")
@_settings.project_options
@click.option("--dry-run", "only_plan", is_flag=True, help="Show the jobs, and compile nothing.")
@_common.report_option
@_common.verbose_option
def command(
    project: Path, targets: tuple[str, ...], only_plan: bool, report: Path | None, verbose: int
) -> None:
    """Compile and validate a project's models, without a wheel.

    PROJECT is the folder with the pyproject.toml; the default is the current folder. The artifacts go into
    the cache, from which the next build of the wheel takes them.
    """
    config = _settings.project_config(project.absolute(), targets)
    planned = plan(config)
    with temp_dir() as staging:
        if only_plan:
            _show_plan(planned, staging)
            return
        _common.run_plan(planned, staging, verbose, Project.read(config.root).name, report)


def _show_plan(planned: Plan, staging: Path) -> None:
    workers = Workers(planned.config.build.timeout)
    jobs = planned.jobs
    try:
        # Reads the models, whose problems the build would have too.
        jobs = begin(planned, staging, open_cache(planned.config, _common.warn), workers).jobs
    except RequirementError as error:
        # Another machine may be the one that compiles.
        messages = " ".join(problem.message for problem in error.problems)
        _common.warn(f"the models are not read: {messages}")
    rows = [(job.location, job.target.provider.name) for job in jobs]
    _common.show_table(("job", "provider"), rows)
    _common.echo(f"requires: {', '.join(map(hide_credentials, planned.requirements))}")

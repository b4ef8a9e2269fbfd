"""The commands: what each takes and what its exit code means. The work is in the modules they name.

Exit codes: 0 done, 1 it was tried and failed, 2 it could not be tried (wrong settings, wrong arguments, store away).
"""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wire.errors import TidegateError
from wire.settings import SettingsError

if TYPE_CHECKING:
    from tidegate.settings import Loaded

Config = Annotated[Path | None, typer.Option("--config", help="tidegate.yaml (default: the one here, if any).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A central inference gateway in front of a pool of Triton replicas that scales to zero and back.",
)


class SchemaOf(StrEnum):
    """Which file's schema."""

    SYSTEM = "system"
    POOL = "pool"


@app.command()
def up(
    config: Config = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once everything is ready.")] = False,
) -> None:
    """Start everything and keep it running; Ctrl-C drains, a second one forces."""
    from tidegate.lifecycle import start_detached, start_here

    _load(config)
    raise typer.Exit(start_detached(config) if detach else start_here(config))


@app.command()
def down(config: Config = None) -> None:
    """Drain and stop the running system; Ctrl-C forces."""
    from tidegate.lifecycle import stop

    raise typer.Exit(stop(_load(config)))


@app.command()
def reload(config: Config = None) -> None:
    """Let the running system take over changed settings, without dropping a request. Ports, the store and the number of
    worker processes stay as they are until the next `up`; a replica keeps what it was started with."""
    from tidegate.reload import reload_running

    raise typer.Exit(reload_running(_load(config)))


@app.command()
def submit(
    queue: Annotated[str, typer.Argument(help="Queue that does the work.")],
    files: Annotated[list[Path], typer.Argument(help="Files to work on, one job each.")],
    config: Config = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("."),
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Longest wait. Unit: seconds.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Queue files, wait for their outcomes, write the results."""
    from tidegate.submit import submit_files

    loaded = _load(config)
    raise typer.Exit(_told(lambda: submit_files(loaded, queue, files, out, timeout, as_json=as_json)))


@app.command()
def status(config: Config = None, as_json: AsJson = False) -> None:
    """Pools, replicas, queues, gateways and the last decisions with their reasons."""
    from tidegate.report import show_status

    loaded = _load(config)
    raise typer.Exit(_told(lambda: show_status(loaded, as_json=as_json)))


@app.command()
def why(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    config: Config = None,
    last: Annotated[int, typer.Option("--last", min=1, help="Decisions to show.")] = 10,
    every: Annotated[bool, typer.Option("--all", help="Also those that gave another reason for the same.")] = False,
    as_json: AsJson = False,
) -> None:
    """Why a pool has as many replicas as it has: the decision that holds, and every change, newest first."""
    from tidegate.report import show_why

    loaded = _load(config)
    raise typer.Exit(_told(lambda: show_why(loaded, pool, last, every=every, as_json=as_json)))


@app.command()
def demo(
    config: Config = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for everything it writes.")] = Path("demo-output"),
) -> None:
    """The main job once, from zero to zero: pages in, text out, checked; leaves nothing running."""
    from tidegate.demo.story import run_demo

    loaded = _load(config)
    raise typer.Exit(_told(lambda: run_demo(loaded, out)))


@app.command()
def key(
    tenant: Annotated[str, typer.Argument(help="Who it is for.")],
    operator: Annotated[bool, typer.Option("--operator", help="May also change and watch the server.")] = False,
) -> None:
    """A new API key, on standard output, and the lines that make it known, on standard error. It is kept nowhere."""
    from pydantic import ValidationError

    from gateway.access import digest, new_key
    from gateway.settings import ApiKeySettings, Role

    made, role = new_key(), Role.OPERATOR if operator else Role.CALLER
    try:
        entry = ApiKeySettings(tenant=tenant, sha256=digest(made.encode()), role=role)
    except ValidationError:
        sys.stderr.write(f"not a name for a tenant: {tenant!r} (letters, digits and _ . - are)\n")
        raise typer.Exit(2) from None
    typer.echo(made)
    sys.stderr.write("gateway:\n  api_keys:\n")
    sys.stderr.write(f"    - {{tenant: {entry.tenant}, sha256: {entry.sha256}, role: {entry.role.value}}}\n")


@app.command()
def schema(what: Annotated[SchemaOf, typer.Argument(help="Whose.")] = SchemaOf.SYSTEM) -> None:
    """JSON Schema of tidegate.yaml (system) or of a pool.yaml (pool)."""
    from tidegate.settings import SystemSettings
    from wire.pools import PoolSettings

    model = SystemSettings if what is SchemaOf.SYSTEM else PoolSettings
    typer.echo(json.dumps(model.model_json_schema(), indent=2))


@app.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
def run(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run one process of the system: gateway, autoscaler, worker or replica."""
    from tidegate.run import main

    raise typer.Exit(main(arguments or ["--help"]))


def _load(config: Path | None) -> "Loaded":
    from tidegate.settings import load

    try:
        return load(config)
    except SettingsError as error:
        count = len(error.problems)
        sys.stderr.write(f"the settings have {count} problem{'s' if count > 1 else ''}:\n")
        sys.stderr.writelines(f"  {problem}\n" for problem in error.problems)
        raise typer.Exit(2) from None


def _told(work: Callable[[], int]) -> int:
    """The exit code of ``work``; an error of ours becomes its sentence and exit code 2."""
    try:
        return work()
    except TidegateError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2

"""The entry of the command line: ``run`` goes straight to its process, everything else through typer."""

import sys


def main() -> int:
    """The exit code of the command in ``sys.argv``."""
    if sys.argv[1:2] == ["run"]:
        # typer and rich cost a replica some 0.2 s of its cold start, and every process some 15 MB.
        from tidegate.run import main as run

        return run(sys.argv[2:])
    from tidegate.commands import app

    app()
    return 0

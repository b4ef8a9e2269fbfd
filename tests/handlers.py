"""Handlers for tests of the worker: no gateway, no models. The payload says what to do."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from wire.jobs import Job
from workers.handlers.interface import BadInput, JobContext


async def handle(job: Job, context: JobContext) -> dict[str, Any]:  # noqa: C901
    """Payload ``<verb> [<argument>]``."""
    verb, _, argument = job.payload.decode().partition(" ")
    match verb:
        case "echo":
            return {"echo": argument, "pid": os.getpid()}
        case "sleep":
            await asyncio.sleep(float(argument))
            return {"pid": os.getpid()}
        case "mark-and-sleep":
            path, seconds = argument.split(" ")
            with Path(path).open("a") as file:
                file.write(f"{job.id} {os.getpid()}\n")
            await asyncio.sleep(float(seconds))
            return {"pid": os.getpid()}
        case "hold-the-loop":
            until = time.monotonic() + float(argument)
            while time.monotonic() < until:
                pass
            return {"pid": os.getpid()}
        case "crash":
            os._exit(9)
        case "cpu":
            return {"sum": await context.cpu(sum, [1, 2, 3])}
        case "bad":
            raise BadInput("this is not a page")
        case "fail":
            raise ValueError("a secret path /somewhere")
        case "timeout":
            raise TimeoutError
        case "not-json":
            return {"value": object()}
    raise AssertionError(verb)

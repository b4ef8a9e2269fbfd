"""What the parts of a benchmark share: the generator, and sides that are started when first asked for."""

from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path

import yaml

from loadtests.closed_loop import ClosedLoop
from loadtests.envoy import envoy
from loadtests.h2load import H2load, installed
from loadtests.measured import Side
from loadtests.rounds import Generator
from loadtests.serve import plain_serve
from loadtests.system import System, running_system
from loadtests.work import DEPLOYMENTS


class Setup:
    """See the module. Everything started ends with ``stack``; ``folder`` gets configurations, logs and state."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.closed_loop = ClosedLoop()
        self.generator: Generator = H2load(folder) if installed() else self.closed_loop

    @cached_property
    def echo(self) -> System:
        """The running system with one replica that echoes."""
        return self._stack.enter_context(self.system("echo", DEPLOYMENTS))

    @cached_property
    def sides(self) -> list[Side]:
        """Direct, the gateway and Envoy, all with the same Triton."""
        direct = self.echo.replicas(1)[0]
        proxy = self._stack.enter_context(envoy(self.folder / "envoy", [direct]))
        return [direct, self.echo.gateway(), proxy]

    @cached_property
    def serve(self) -> Side:
        """Ray Serve's own proxy with a plain pass-through application; HTTP only."""
        return self._stack.enter_context(plain_serve(self.sides[0])).side

    def system(self, name: str, deployments: Path) -> AbstractContextManager[System]:
        """A running system without workers and queues, to be entered."""
        return running_system(self.folder / name, deployments, workers={"processes": 0}, queues={})

    def pool(self, name: str, models: Path, settings: dict[str, object]) -> Path:
        """A deployments folder with one pool, ``name``: the models (and their sources) of another, its own settings."""
        pool = self.folder / f"{name}-deployments" / name
        pool.mkdir(parents=True)
        for part in ("models", "samples", "sources.yaml"):
            if (models / part).exists():
                (pool / part).symlink_to((models / part).resolve())
        (pool / "pool.yaml").write_text(yaml.safe_dump(settings))
        return pool.parent

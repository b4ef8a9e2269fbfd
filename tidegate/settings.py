"""All settings as one: ``tidegate.yaml`` and every ``deployments/<pool>/pool.yaml``, validated together."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from autoscaler.settings import AutoscalerSettings
from gateway.settings import GatewaySettings, TlsSettings
from gateway.tls import HTTP, ServerTls, UnusableCertificateError
from stores.settings import StoreSettings
from tidegate.yamls import read_yaml
from wire.pools import Name, PoolSettings
from wire.queues import QueueSettings
from wire.settings import SettingsError, SettingsModel, SettingsProblem, problems_of
from workers.settings import WorkerSettings

#: Where the settings are looked for when nobody says.
DEFAULT_CONFIG = Path("tidegate.yaml")

M = TypeVar("M", bound=SettingsModel)


class SystemSettings(SettingsModel):
    """``tidegate.yaml``: the system around the pools."""

    store: StoreSettings = StoreSettings()
    """Where shared state lives."""
    gateway: GatewaySettings = GatewaySettings()
    """The endpoint callers talk to."""
    autoscaler: AutoscalerSettings = AutoscalerSettings()
    """Who decides how many replicas there are."""
    workers: WorkerSettings = WorkerSettings()
    """Who takes jobs from the queues."""
    queues: dict[Name, QueueSettings] = Field(
        default={
            "segment": QueueSettings(handler="workers.handlers.segment:handle", pools=("vision",)),
            "segcls": QueueSettings(handler="workers.handlers.segcls:handle", pools=("vision",)),
        }
    )
    """The queues, by name."""
    state_dir: Path = Path(".tidegate")
    """Folder for the embedded store's data, logs and process records; relative to this file."""
    deployments_dir: Path = Path("deployments")
    """Folder that holds one folder per pool; relative to this file."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings that passed every check. All paths are absolute."""

    config_path: Path
    """The file they came from, or would have come from; names this installation in process listings."""
    system: SystemSettings
    pools: dict[str, PoolSettings]

    @property
    def state_dir(self) -> Path:
        return self.system.state_dir

    @property
    def run_dir(self) -> Path:
        """Working files of the processes; nothing in it is needed after a restart."""
        return self.state_dir / "run"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    def repository(self, pool: str) -> Path:
        """The Triton model repository of ``pool``."""
        return repository_of(self.system.deployments_dir / pool)


def repository_of(pool_dir: Path) -> Path:
    """The Triton model repository in a pool's folder."""
    return pool_dir / "models"


def load(config_path: Path | None = None, *, must_exist: bool = True) -> Loaded:
    """All settings, checked together; ``config_path`` None means ``tidegate.yaml`` here, and defaults if there is none.
    ``must_exist`` False means defaults when ``config_path`` is missing too.

    Raises:
        SettingsError: with every problem of every file at once.
    """
    path = (config_path or DEFAULT_CONFIG).resolve()
    problems: list[SettingsProblem] = []
    raw: dict[str, Any] = {}
    shown = str(config_path or DEFAULT_CONFIG)
    if path.exists():
        raw, problems = read_yaml(path, shown=shown)
    elif config_path is not None and must_exist:
        raise SettingsError([SettingsProblem(str(config_path), "(file)", "no such file", str(path))])
    unread = bool(problems) and not raw
    system, wrong = _validated(SystemSettings, raw, shown)
    problems += wrong
    system = system or SystemSettings()
    root = path.parent
    system = system.model_copy(
        update={
            "state_dir": root / system.state_dir,
            "deployments_dir": root / system.deployments_dir,
            "gateway": system.gateway.model_copy(update={"tls": with_absolute_files(system.gateway.tls, root)}),
            "workers": system.workers.model_copy(update={"gateway": with_absolute_files(system.workers.gateway, root)}),
        }
    )
    broken = {problem.key for problem in problems if problem.file == shown}
    pools, names, wrong = _pools(system.deployments_dir)
    problems += wrong
    # What follows from a default that stands in for something unreadable is no news.
    if not unread:
        if not names and "deployments_dir" not in broken:
            problems.append(_no_pool(shown, system.deployments_dir))
        problems += _ports(shown, system, broken)
        problems += _certificates(shown, system.gateway.tls)
        problems += _queues(shown, system, names)
    if problems:
        raise SettingsError(problems)
    return Loaded(path, system, pools)


def with_absolute_files(settings: M, root: Path) -> M:
    """``settings`` with every path in it relative to ``root``."""
    paths = {name: root / value for name, value in settings if isinstance(value, Path)}
    return settings.model_copy(update=paths)


def _validated(model: type[M], raw: dict[str, Any], file: str) -> tuple[M | None, list[SettingsProblem]]:
    """``raw`` as a model and what is wrong with it; the model is then made of the sound parts, so that the rules across
    sections and files are still checked. None when nothing can be made of them."""
    try:
        return model.model_validate(raw), []
    except ValidationError as error:
        problems, broken = problems_of(file, error), [detail["loc"] for detail in error.errors(include_url=False)]
    sound = _without(raw, broken)
    while True:
        try:
            return model.model_validate(sound), problems
        except ValidationError as error:
            # What is still missing makes its parent useless.
            smaller = _without(sound, [detail["loc"][:-1] for detail in error.errors(include_url=False)])
            if smaller == sound:
                return None, problems
            sound = smaller


def _without(raw: dict[str, Any], locations: list[tuple[int | str, ...]]) -> dict[str, Any]:
    """A copy of ``raw`` without what is at ``locations``; a list loses the whole of itself."""
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for location in locations:
        if not location:
            continue
        head, *rest = location
        inner = copy.get(str(head))
        if rest and isinstance(inner, dict):
            copy[str(head)] = _without(inner, [tuple(rest)])
        else:
            copy.pop(str(head), None)
    return copy


def _pools(deployments_dir: Path) -> tuple[dict[str, PoolSettings], set[str], list[SettingsProblem]]:
    """Every pool that is sound, the names of all, and every problem."""
    folder = deployments_dir.name
    files = sorted(deployments_dir.glob("*/pool.yaml"))
    problems: list[SettingsProblem] = []
    pools: dict[str, PoolSettings] = {}
    for file in files:
        shown = f"{folder}/{file.parent.name}/pool.yaml"
        raw, wrong = read_yaml(file, shown=shown)
        problems += wrong
        pool, invalid = _validated(PoolSettings, raw, shown) if not wrong or raw else (None, [])
        problems += invalid
        if pool is None:
            continue
        problems += _models(shown, pool, repository_of(file.parent))
        for other_name, other in pools.items():
            for model in sorted(set(pool.model_names) & set(other.model_names)):
                rule = f"a model may be served by one pool only; pool {other_name} has it too"
                problems.append(SettingsProblem(shown, "models", rule, model))
        pools[file.parent.name] = pool
    return pools, {file.parent.name for file in files}, problems


def _no_pool(shown: str, deployments_dir: Path) -> SettingsProblem:
    rule = "there is no pool: no <pool>/pool.yaml in this folder"
    return SettingsProblem(shown, "deployments_dir", rule, str(deployments_dir))


def _models(shown: str, pool: PoolSettings, repository: Path) -> Iterator[SettingsProblem]:
    for index, name in enumerate(pool.model_names):
        if not (repository / name / "config.pbtxt").is_file():
            rule = f"the model repository has no {repository.name}/{name}/config.pbtxt"
            yield SettingsProblem(shown, f"models.{index}.name", rule, name)


def ports_of(system: SystemSettings) -> dict[str, int]:
    """Every port that ``up`` listens on, by the setting that names it."""
    gateway = system.gateway
    ports = {
        "gateway.http_port": gateway.http_port,
        "gateway.grpc_port": gateway.grpc_port,
        "gateway.metrics_port": gateway.metrics_port,
        "gateway.control_port": gateway.control_port,
    }
    if system.store.url is None:
        ports["store.embedded_port"] = system.store.embedded_port
    return ports


def _ports(shown: str, system: SystemSettings, broken: set[str]) -> Iterator[SettingsProblem]:
    seen: dict[int, str] = {}
    for key, port in ports_of(system).items():
        if key in broken or (key == "store.embedded_port" and "store.url" in broken):
            continue
        if port in seen:
            yield SettingsProblem(shown, key, f"this port is {seen[port]} already", str(port))
        seen.setdefault(port, key)


def _certificates(shown: str, tls: TlsSettings) -> Iterator[SettingsProblem]:
    if tls.certificate is None:
        return
    try:
        ServerTls(tls, HTTP)
    except UnusableCertificateError as error:
        yield SettingsProblem(shown, "gateway.tls", "the files cannot be used", str(error))


def _queues(shown: str, system: SystemSettings, pools: set[str]) -> Iterator[SettingsProblem]:
    if not pools:
        return  # told once, as the absence of any pool
    for name, queue in system.queues.items():
        for pool in queue.pools:
            if pool not in pools:
                rule = f"names a pool that does not exist (known: {', '.join(sorted(pools))})"
                yield SettingsProblem(shown, f"queues.{name}.pools", rule, pool)

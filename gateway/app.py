"""The gateway as a Ray Serve application, and how one machine runs it.

Serve owns placement, life cycle, health and the control API; the bytes of inference never pass its proxy: each
instance opens the data plane's ports by itself.
"""

import fcntl
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.instance import GatewayInstance, LogTarget, quiet_ray
from gateway.local_ray import LocalRay, prepare_environment
from gateway.ports import PortTakenError, refuse_taken_ports
from gateway.settings import InstanceSettings
from wire.settings import SettingsError

log = logging.getLogger(__name__)

APPLICATION = "tidegate"
#: Beyond the drain limit, for writing last errors and telling the store. Seconds.
_DRAIN_MARGIN_SECONDS = 5.0
#: Ray's processes get this long to end by themselves. Seconds.
_END_SECONDS = 3.0
#: How often the living parts are looked at while nothing happens. Seconds.
_WATCH_SECONDS = 1.0


def application(settings: InstanceSettings, logs: LogTarget | None = None, *, spare_instances: int = 0) -> Any:
    """The Serve application, for ``serve.run`` or a RayService. ``spare_instances`` come on top of those set."""
    from ray import serve

    def control() -> Any:
        # Called in each instance: only there is FastAPI needed, and only there are there loops and connections.
        from gateway.access import Access
        from gateway.control import control_app

        return control_app(settings.store, tuple(settings.pools), settings.queues, Access(settings.gateway.api_keys))

    gateway = settings.gateway
    deployment = serve.deployment(
        name="gateway",
        num_replicas=gateway.instances + spare_instances,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=gateway.drain_limit_seconds + _DRAIN_MARGIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.05,
        health_check_period_s=5.0,
        health_check_timeout_s=10.0,
        max_constructor_retry_count=1,
    )(serve.ingress(control)(GatewayInstance))
    # Serve's own version is another one each time, and then it replaces instances for a change of their number, too.
    return deployment.options(version=_version(settings), _internal=True).bind(settings, logs)


def _version(settings: InstanceSettings) -> str:
    """The same for settings that make the same instances."""
    per_instance = replace(settings, gateway=settings.gateway.model_copy(update={"instances": 1}))
    return hashlib.sha256(repr(per_instance).encode()).hexdigest()[:16]


def run_gateway(settings: InstanceSettings, ray_dir: Path, reread: Callable[[], InstanceSettings]) -> int:
    """Start Ray, Serve and the gateway on this machine; returns the exit code when it has left.

    The first SIGTERM or SIGINT drains, the second forces; SIGHUP takes over what ``reread`` returns (or keeps what it
    has, when that raises SettingsError). Call it on the main thread. ``ray_dir`` is removed.
    """
    code = 1
    try:
        refuse_taken_ports(settings.gateway)
    except PortTakenError as error:
        log.error("event=gateway-failed error=%r", str(error))
        return code
    stop, ray = _Stop(), LocalRay(ray_dir)
    stop.install()
    started = False
    try:
        _start(settings, ray, stop)
        started = True
        while _watch(ray, stop):
            settings = _reload(settings, reread)
    except PortTakenError as error:
        log.error("event=gateway-failed error=%r", str(error))
    except _Signalled:
        code = _drain(settings.gateway.drain_limit_seconds, stop) if started else 0
    finally:
        stop.ending = True
        ray.stop(patience_seconds=0.0 if stop.forced.is_set() else _END_SECONDS)
    return code


class _Signalled(BaseException):
    """A signal asks the gateway to leave."""


class _Stop:
    """What signals ask for. The first that ends raises _Signalled where the main thread is, a later one stops waiting
    for anything; SIGHUP only leaves a note."""

    def __init__(self) -> None:
        self.asked = False
        self.reload = False
        self.ending = False
        self.forced = threading.Event()

    def install(self) -> None:
        """Also after ``ray.init``, which installs a handler of its own."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hang_up)

    def _on_hang_up(self, *_: object) -> None:
        self.reload = True

    def _on_signal(self, *_: object) -> None:
        if self.ending:
            return
        if self.asked:
            self.forced.set()
            return
        self.asked = True
        raise _Signalled


def _start(settings: InstanceSettings, ray: LocalRay, stop: _Stop) -> None:
    """Ray, then Serve, then the application; raises PortTakenError and RuntimeError."""
    began = time.monotonic()
    prepare_environment(Path(__file__).resolve().parent.parent)
    imports = threading.Thread(target=_import_ahead)
    imports.start()
    ray.start()
    stop.install()
    imports.join()
    ray_up = time.monotonic()
    from ray import serve

    quiet_ray()
    gateway = settings.gateway
    serve.start(proxy_location="HeadOnly", http_options={"host": gateway.host, "port": gateway.control_port})
    serve_up = time.monotonic()
    try:
        _deploy(settings)
    except RuntimeError as error:
        raise _plain(error) from error
    log.info(
        "event=gateway-ready seconds=%.2f ray_seconds=%.2f serve_seconds=%.2f application_seconds=%.2f",
        time.monotonic() - began,
        ray_up - began,
        serve_up - ray_up,
        time.monotonic() - serve_up,
    )


def _import_ahead() -> None:
    """While Ray's processes start, this one would only wait for them."""
    import ray.serve  # noqa: F401


def _deploy(settings: InstanceSettings, *, spare_instances: int = 0) -> None:
    """Bring the application to this state, and wait until it is. Raises RuntimeError."""
    from ray import serve

    wanted = application(settings, _log_target(), spare_instances=spare_instances)
    serve.run(wanted, name=APPLICATION, route_prefix="/")


def _watch(ray: LocalRay, stop: _Stop) -> bool:
    """Until a signal. Serve replaces instances and its own actors; if Ray itself has died, so does the gateway.
    True when the settings are to be read again."""
    while ray.alive:
        if stop.asked:  # the exception of the signal was lost in a callback of somebody else's
            raise _Signalled
        if stop.reload:
            stop.reload = False
            return True
        time.sleep(_WATCH_SECONDS)
    log.error("event=gateway-failed error='a process of Ray has ended'")
    return False


def _reload(old: InstanceSettings, reread: Callable[[], InstanceSettings]) -> InstanceSettings:
    """Replace the instances one by one with such as have the settings of now; returns those that hold afterwards.

    Serve ends an old instance before it starts the new one. Where there is only one, a second is started first, with
    the old settings, so that somebody takes connections at every moment.
    """
    try:
        new = reread()
    except SettingsError as error:
        log.error("event=reload-refused problems=%r", [str(problem) for problem in error.problems])
        return old
    if new == old:
        log.info("event=reload-unneeded")
        return old
    began = time.monotonic()
    log.info("event=reload-began")
    try:
        if min(old.gateway.instances, new.gateway.instances) == 1:
            _deploy(old, spare_instances=1)
            _deploy(new, spare_instances=1)
        _deploy(new)
    except RuntimeError as error:
        log.error("event=reload-failed error=%r", str(_plain(error)))
        return old
    log.info("event=reloaded seconds=%.2f", time.monotonic() - began)
    return new


def _drain(limit_seconds: float, stop: _Stop) -> int:
    """Let every instance finish; 0, or 1 when a second signal or the limit came first."""
    from ray import serve

    log.info("event=gateway-draining limit_seconds=%.1f", limit_seconds)
    until = time.monotonic() + limit_seconds + 2 * _DRAIN_MARGIN_SECONDS
    try:
        serve.delete(APPLICATION, _blocking=False)
        while APPLICATION in serve.status().applications:
            if stop.forced.is_set() or time.monotonic() > until:
                log.warning("event=gateway-forced")
                return 1
            time.sleep(0.05)
    except Exception as error:  # noqa: BLE001 (whatever Serve raises while it goes away: we leave all the same)
        log.warning("event=drain-failed error=%r", str(error))
        return 1
    return 0


def _plain(error: RuntimeError) -> Exception:
    """Serve's report of a failed deployment as the one sentence in it that matters."""
    for line in str(error).splitlines():
        _, found, sentence = line.partition(f"{PortTakenError.__name__}: ")
        if found:
            return PortTakenError(sentence.strip())
    return error


def _log_target() -> LogTarget:
    # Instances open the same file again; unless every writer appends, they overwrite each other.
    stderr = sys.stderr.fileno()
    fcntl.fcntl(stderr, fcntl.F_SETFL, fcntl.fcntl(stderr, fcntl.F_GETFL) | os.O_APPEND)
    root = logging.getLogger()
    formatter = root.handlers[0].formatter if root.handlers else None
    return LogTarget(f"/proc/{os.getpid()}/fd/{stderr}", root.level, formatter)

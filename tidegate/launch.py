"""How the processes of an installation are started, and where they are reached."""

import sys

from tidegate.settings import Loaded


def run_command(loaded: Loaded, role: str) -> tuple[str, ...]:
    """The command that starts one process of this installation; the path of its settings names it in listings."""
    return (
        *(sys.executable, "-m", "tidegate", "run", role, "--config", str(loaded.config_path)),
        *no_file_flag(loaded),
    )


def no_file_flag(loaded: Loaded) -> tuple[str, ...]:
    """Settings that are all defaults come from no file; the processes must not miss it."""
    return () if loaded.config_path.exists() else ("--no-config-file",)


def gateway_url(loaded: Loaded) -> str:
    """Where processes on this host reach the data plane."""
    gateway = loaded.system.gateway
    scheme = "http" if gateway.tls.certificate is None else "https"
    return f"{scheme}://{reachable(gateway.host)}:{gateway.http_port}"


def addresses(loaded: Loaded) -> dict[str, str]:
    """Where the running system is reached, for people."""
    gateway, store = loaded.system.gateway, loaded.system.store
    host = reachable(gateway.host)
    found: dict[str, str] = {
        "http": gateway_url(loaded),
        "grpc": f"{host}:{gateway.grpc_port}",
        "metrics": f"http://{host}:{gateway.metrics_port}/metrics",
        "control": f"http://{host}:{gateway.control_port}",
    }
    found["store"] = f"redis://127.0.0.1:{store.embedded_port}/0" if store.url is None else "(store.url)"
    return found


def reachable(host: str) -> str:
    """An address to connect to for an address that is bound to."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host

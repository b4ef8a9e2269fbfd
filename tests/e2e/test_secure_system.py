"""The whole system behind TLS and API keys: workers get in with a key of their own, strangers do not."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import trustme

from gateway.access import digest, new_key
from tests.e2e.system import running_system
from workers.sample_pages import sample_pages


def test_jobs_run_and_only_operators_see_the_control_api(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = authority.issue_cert("127.0.0.1")
    server.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    (tmp_path / "server.pem").write_bytes(b"".join(part.bytes() for part in server.cert_chain_pems))
    worker, operator = new_key(), new_key()
    (tmp_path / "worker.key").write_text(worker + "\n")
    settings = {
        "gateway": {
            "tls": {"certificate": "server.pem", "private_key": "server.key"},
            "api_keys": [
                {"tenant": "workers", "sha256": digest(worker.encode())},
                {"tenant": "ops", "sha256": digest(operator.encode()), "role": "operator"},
            ],
        },
        "workers": {"gateway": {"api_key_file": "worker.key", "ca": "ca.pem"}},
    }
    page = tmp_path / "page.png"
    page.write_bytes(sample_pages()[0].png)
    with running_system(tmp_path, settings=settings) as system:
        system.tidegate("submit", "segcls", str(page), "--out", str(tmp_path))
        outcome = json.loads((tmp_path / "page.json").read_text())["outcome"]
        assert outcome["result"]["regions"]

        def status(url: str, key: str) -> int:
            asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
            context = ssl.create_default_context(cafile=tmp_path / "ca.pem") if url.startswith("https") else None
            try:
                with urllib.request.urlopen(asked, context=context, timeout=10) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        seen = [status(f"{system.control_url}/v1/status", key) for key in ("", worker, operator)]
        assert seen == [401, 403, 200]
        models = f"https://{system.http_address}/v2/models/reader"
        assert [status(models, key) for key in ("", new_key(), worker)] == [401, 401, 200]

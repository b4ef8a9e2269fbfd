"""The import contracts hold, and a planted violation of each one fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("wire", "stores", "gateway", "replicas", "workers", "autoscaler", "loadtests", "tidegate")

#: (contract that must break, file that gets the line, the line)
PLANTED = [
    ("Rooms are layered", "wire/jobs.py", "import stores.store"),
    ("Rooms are layered", "workers/worker.py", "import gateway.settings"),
    ("redis has one home", "autoscaler/loop.py", "import redis"),
    ("ray has one home", "replicas/agent.py", "import ray"),
    ("tritonclient is used by", "gateway/routing/pool.py", "import tritonclient.http"),
    ("Decisions are pure", "autoscaler/decision/decide.py", "import time"),
    ("Decisions are pure", "gateway/routing/policy.py", "import random"),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rooms' sources alone, so that planting never touches the real ones."""
    folder = tmp_path_factory.mktemp("rooms")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_contracts_hold(copied: Path) -> None:
    result = lint(copied)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("contract", "file", "line"), PLANTED)
def test_a_planted_violation_fails(copied: Path, contract: str, file: str, line: str) -> None:
    target = copied / file
    original = target.read_text()
    target.write_text(f"{original}\n{line}\n")
    try:
        result = lint(copied)
    finally:
        target.write_text(original)
    broken = [text for text in result.stdout.splitlines() if "BROKEN" in text]
    assert result.returncode != 0
    assert any(contract in text for text in broken), result.stdout

"""The documents lead to files and names that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("wire", "stores", "gateway", "replicas", "workers", "autoscaler", "loadtests", "tidegate", "tests")
SOURCES = {path: path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    for name in set(re.findall(r"`([\w./<>-]+\.(?:py|yaml|lua))`", document.read_text())):
        if "<" in name:
            continue
        known = any(str(path).endswith("/" + name) for path in ROOT.glob(f"[!.]*/**/{Path(name).name}"))
        assert known or (ROOT / name).exists(), f"{document.name} names {name}, which does not exist"


def test_named_code_exists() -> None:
    """`file.py` `Name.method` in the architecture: the file defines that name."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.py)` `([A-Za-z_.]+)`", text)
    assert len(named) > 15
    for file, name in named:
        sources = [source for path, source in SOURCES.items() if str(path).endswith("/" + file)]
        last = name.split(".")[-1]
        assert any(re.search(rf"\b(def|class) {last}\b", source) for source in sources), f"{file} has no {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), f"{document.name}: {target}"

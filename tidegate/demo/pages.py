"""The demo's pages, and whether what was read is what stands on them."""

from pathlib import Path

from tidegate.submit import Submitted
from workers.sample_pages import SampleLine, SamplePage, sample_pages


def write_pages(folder: Path, samples: Path) -> tuple[list[Path], dict[str, SamplePage]]:
    """The files to submit: drawn pages, whose text is known (by file name), and every picture in ``samples``."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {page.name: page for page in sample_pages()}
    files = []
    for page in known.values():
        files.append(folder / page.name)
        files[-1].write_bytes(page.png)
    return files + sorted(samples.glob("*.png")), known


def differences(submitted: Submitted, page: SamplePage) -> list[str]:
    """Every line that was not read as it was drawn, in words; none when all were."""
    read = [(region.get("text"), region.get("orientation")) for region in submitted.result.get("regions", [])]
    drawn = [(line.text, line.orientation) for line in page.lines]
    if len(read) != len(drawn):
        return [f"{page.name}: {len(drawn)} lines were drawn and {len(read)} found"]
    return [
        f"{page.name}: drawn {_words(line)}, read {text!r} at {orientation}°"
        for line, (text, orientation) in zip(page.lines, read, strict=True)
        if (text, orientation) != (line.text, line.orientation)
    ]


def _words(line: SampleLine) -> str:
    return f"{line.text!r} at {line.orientation}°"

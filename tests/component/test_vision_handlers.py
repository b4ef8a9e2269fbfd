"""The handlers with the real models, run in this process: texts, spaces and orientations come back exactly."""

from pathlib import Path

import pytest

from tests.local_models import LocalModels
from wire.jobs import Job
from workers.handlers import segcls, segment
from workers.handlers.interface import BadInput
from workers.sample_pages import SampleLine, SamplePage, draw_page, sample_pages

_TEXTS = (
    "Deliver to dock 7 before noon",
    "Please sign and return both copies",
    "Weight 18.4 kg, height 92 cm",
    "Meeting at 14:30 in room 205",
    "The tide comes in, the tide goes out",
    "Requests wait here while a replica wakes up.",
)


def _further_pages() -> list[SamplePage]:
    """Small and large letters, narrow and wide pages, each line upright on one page and upside down on another."""
    pages = []
    for size, width in ((20, 700), (30, 1600), (52, 1500)):
        for first in (0, 1):
            lines = tuple(
                SampleLine(text, orientation=180 if number % 2 == first else 0, size=size)
                for number, text in enumerate(_TEXTS)
            )
            pages.append(draw_page(f"{size}-{width}-{first}", lines, width=width))
    return pages


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    return LocalModels(tmp_path_factory.mktemp("deployments"))


@pytest.mark.parametrize("page", [*sample_pages(), *_further_pages()], ids=lambda page: page.name)
async def test_what_was_rendered_is_read(models: LocalModels, page: SamplePage) -> None:
    """Acceptance 2, without the gateway between."""
    result = await segcls.handle(Job(queue="segcls", payload=page.png), models)
    found = [(region["text"], region["orientation"]) for region in result["regions"]]
    assert found == [(line.text, line.orientation) for line in page.lines]
    assert list(result["milliseconds"]) == ["decode", "segment", "classify", "read"]


async def test_segment_finds_the_same_regions_without_reading(models: LocalModels) -> None:
    page = sample_pages()[0]
    models.calls.clear()
    result = await segment.handle(Job(queue="segment", payload=page.png), models)
    assert models.calls == ["segmenter"]
    assert len(result["regions"]) == len(page.lines)
    assert result["page"]["width"] == 900
    for region in result["regions"]:
        assert all(0 <= x <= 900 for x, _ in region["quad"])


async def test_a_photograph_of_handwriting_gives_regions(models: LocalModels) -> None:
    payload = Path("deployments/vision/samples/text.png").read_bytes()
    result = await segcls.handle(Job(queue="segcls", payload=payload), models)
    assert result["regions"]


async def test_an_empty_page_has_no_regions(models: LocalModels) -> None:
    page = draw_page("empty", ())
    result = await segcls.handle(Job(queue="segcls", payload=page.png), models)
    assert result["regions"] == []


async def test_what_is_no_page_is_refused_before_any_inference(models: LocalModels) -> None:
    models.calls.clear()
    with pytest.raises(BadInput):
        await segcls.handle(Job(queue="segcls", payload=b"\x89PNG broken"), models)
    assert models.calls == []

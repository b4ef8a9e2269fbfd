"""What the command line shows and decides, without a system."""

import io
import logging
from pathlib import Path

import pytest
from PIL import Image

from tidegate.annotate import annotated_png, shown_text
from tidegate.demo.pages import differences
from tidegate.logs import LineFormatter
from tidegate.submit import Submitted, describe_wait, submit_files, unique_names
from tidegate.supervisor.children import backoff_seconds
from wire.jobs import Outcome, OutcomeStatus
from wire.membership import ReplicaLease, ReplicaState, StartStage
from workers.sample_pages import SampleLine, SamplePage


def png(width: int = 200, height: int = 100, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), "white").save(file, "PNG")
    return file.getvalue()


def pixels(payload: bytes) -> Image.Image:
    return Image.open(io.BytesIO(payload))


def test_regions_are_drawn_in_the_colour_of_their_orientation() -> None:
    quad = [[10, 10], [150, 10], [150, 40], [10, 40]]
    upright = annotated_png(png(), {"regions": [{"quad": quad, "text": "Tide", "orientation": 0}]})
    turned = annotated_png(png(), {"regions": [{"quad": quad, "text": "Tide", "orientation": 180}]})
    assert upright is not None and turned is not None
    assert pixels(upright).size == (200, 100)
    (r, g, _), (r2, g2, _) = (pixels(one).convert("RGB").getpixel((80, 10)) for one in (upright, turned))
    assert g > r and r2 > g2


def test_what_could_hardly_be_read_is_not_shown_as_text() -> None:
    assert shown_text({"text": "S", "text_score": 0.21}) == "(not legible, score 0.21)"
    assert shown_text({"text": "", "text_score": 0.0}) == "(not legible, score 0.00)"
    assert shown_text({"text": "Tide", "text_score": 0.5}) == "Tide"
    assert shown_text({"quad": []}) == ""


@pytest.mark.parametrize("result", [{}, {"regions": None}, {"regions": "words"}])
def test_results_without_regions_have_no_picture(result: dict[str, object]) -> None:
    assert annotated_png(png(), result) is None


def test_a_payload_that_is_no_image_has_no_picture() -> None:
    assert annotated_png(b"plain words", {"regions": []}) is None


def test_transparent_paper_is_white() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(file, "PNG")
    picture = annotated_png(file.getvalue(), {"regions": []})
    assert picture is not None
    assert pixels(picture).getpixel((5, 5)) == (255, 255, 255)


def test_labels_stay_on_the_page() -> None:
    """A region at the lower right edge: its label is moved in."""
    quad = [[150, 80], [199, 80], [199, 99], [150, 99]]
    picture = annotated_png(png(), {"regions": [{"quad": quad, "text": "a long line of text at the edge"}]})
    assert picture is not None
    assert pixels(picture).crop((0, 60, 100, 100)).getextrema() != ((255, 255),) * 3


def test_a_cold_start_is_told_by_what_it_waits_for() -> None:
    starting = ReplicaLease(
        id="vision-1",
        pool="vision",
        state=ReplicaState.WARMING,
        waiting_for="model segmenter",
        stages=(StartStage(name="process", seconds=0.52),),
    )
    failed = ReplicaLease(id="vision-0", pool="vision", state=ReplicaState.FAILED, reason="no libpython")
    ready = starting.model_copy(update={"state": ReplicaState.READY})
    assert describe_wait("vision", []) == "pool vision is at zero and asked to wake up"
    assert describe_wait("vision", [failed]) == "pool vision has no replica: no libpython"
    assert "warming, waiting for model segmenter, process took 0.5 s" in describe_wait("vision", [failed, starting])
    assert describe_wait("vision", [starting, ready, ready]) == "pool vision works on 2 replicas"


def test_results_of_files_with_one_name_do_not_overwrite_each_other() -> None:
    files = [Path("a/page.png"), Path("b/page.png"), Path("b/page.jpg"), Path("other.png")]
    assert unique_names(files) == ["page.png", "page.png-2", "page.jpg", "other"]


def test_what_cannot_be_submitted_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown queue; missing, empty and too large files, a folder: one sentence each, exit code 2."""
    from tidegate.settings import Loaded, SystemSettings
    from wire.queues import QueueSettings

    queue = QueueSettings(handler="a:b", pools=("vision",), payload_limit_bytes=10)
    loaded = Loaded(tmp_path / "tidegate.yaml", SystemSettings(queues={"scan": queue}), {})
    assert submit_files(loaded, "skan", [], tmp_path, 1.0, as_json=False) == 2
    assert capsys.readouterr().err == "there is no queue skan; known: scan\n"
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "large").write_bytes(b"x" * 11)
    files = [tmp_path / name for name in ("empty", "large", "missing", ".")]
    assert submit_files(loaded, "scan", files, tmp_path, 1.0, as_json=False) == 2
    told = capsys.readouterr().err.splitlines()
    assert [words.partition(": ")[2] for words in told] == [
        "the file is empty",
        "11 bytes are more than the queue takes (payload_limit_bytes: 10)",
        "no such file",
        "is not a file",
    ]


def test_an_outcome_that_never_came_is_not_a_success() -> None:
    submitted = Submitted(Path("a.png"), "a", "1-0", None)
    assert not submitted.succeeded
    assert "no outcome in time" in submitted.reason
    last = Submitted(
        Path("a.png"), "a", "1-0", None, "pool vision has no replica: the model file of 'reader' is missing"
    )
    assert "in time (pool vision has no replica: the model file of 'reader' is missing); the job" in last.reason
    failed = Outcome(job_id="1-0", queue="q", status=OutcomeStatus.FAILED, error="the file is empty")
    assert Submitted(Path("a.png"), "a", "1-0", failed).reason == "the file is empty"


def test_each_line_that_was_read_otherwise_is_named() -> None:
    page = SamplePage("p.png", b"", (SampleLine("one"), SampleLine("two", orientation=180)))

    def read(*regions: tuple[str, int]) -> Submitted:
        result = {"regions": [{"text": text, "orientation": orientation} for text, orientation in regions]}
        outcome = Outcome(job_id="1-0", queue="q", status=OutcomeStatus.SUCCEEDED, result=result)
        return Submitted(Path("p.png"), "p", "1-0", outcome)

    assert differences(read(("one", 0), ("two", 180)), page) == []
    assert differences(read(("one", 0)), page) == ["p.png: 2 lines were drawn and 1 found"]
    assert differences(read(("0ne", 0), ("two", 0)), page) == [
        "p.png: drawn 'one' at 0°, read '0ne' at 0°",
        "p.png: drawn 'two' at 180°, read 'two' at 0°",
    ]


def test_waits_between_starts_grow_and_are_bounded() -> None:
    waits = [backoff_seconds(failures) for failures in range(1, 20)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits == sorted(waits)
    assert max(waits) == 30.0


def test_a_log_line_is_one_line_whatever_is_in_it() -> None:
    record = logging.LogRecord("gateway.app", logging.WARNING, "f", 1, "two\nlines of %s", ('"words"',), None)
    record.created, record.msecs = 0.0, 7.0
    line = LineFormatter("gateway").format(record)
    assert line == (
        "at=1970-01-01T00:00:00.007Z level=warning process=gateway from=gateway.app "
        r'message="two\nlines of \"words\""'
    )

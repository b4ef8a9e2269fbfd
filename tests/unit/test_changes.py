"""What has to be kept of operators' changes so that a new replica ends where the others are."""

from wire.changes import Change, ChangeKind, Numbered, loaded, obsolete, unloaded

MINUTE = 60_000


def change(number: int, kind: ChangeKind, about: str, *, plain: bool = False, at: int = 0) -> Numbered:
    models = (about,) if kind in (ChangeKind.LOAD, ChangeKind.UNLOAD) else ()
    return Numbered(
        id=f"{at}-{number}", change=Change(token=str(number), kind=kind, about=about, models=models, plain=plain)
    )


def load(number: int, model: str, **more: bool | int) -> Numbered:
    return change(number, ChangeKind.LOAD, model, **more)  # type: ignore[arg-type]


def unload(number: int, model: str, at: int = 0) -> Numbered:
    return change(number, ChangeKind.UNLOAD, model, at=at)


def gone(*changes: Numbered, settings: tuple[str, ...] = ()) -> list[int]:
    """Numbers of those not kept once the last is made."""
    return [int(each.partition("-")[2]) for each in obsolete(changes, changes[-1], settings)]


def test_a_later_change_of_the_same_thing_replaces_the_earlier() -> None:
    assert gone(unload(1, "a"), unload(2, "b"), load(3, "a")) == [1]
    assert gone(load(1, "a"), unload(2, "a")) == [1]
    assert gone(load(1, "a", plain=True), load(2, "a", plain=True)) == [1]
    trace, log = "trace::trace_level", "log::log_info"
    assert gone(*(change(i, ChangeKind.SETTINGS, about) for i, about in enumerate((trace, log, trace)))) == [0]


def test_a_plain_load_does_not_replace_one_with_parameters() -> None:
    """Triton leaves a loaded model as it is, so its given config stays in force."""
    assert gone(load(1, "a"), load(2, "a", plain=True)) == []
    assert gone(load(1, "a"), load(2, "a", plain=True), load(3, "a", plain=True)) == [2]
    assert gone(load(1, "a"), unload(2, "a"), load(3, "a", plain=True)) == [1, 2]


def test_regions() -> None:
    def register(number: int, about: str) -> Numbered:
        return change(number, ChangeKind.REGISTER, about)

    def unregister(number: int, about: str) -> Numbered:
        return change(number, ChangeKind.UNREGISTER, about)

    assert gone(register(1, "system/a"), register(2, "system/b"), unregister(3, "system/a")) == [1]
    assert gone(register(1, "system/a"), register(2, "cuda/b"), unregister(3, "system/")) == [1]


def test_what_only_undoes_is_forgotten_once_every_replica_has_read_it() -> None:
    junk, back = unload(1, "junk"), load(2, "a", plain=True)
    away = unload(3, "b")
    soon, late = load(4, "x", at=MINUTE), load(5, "x", at=11 * MINUTE)
    assert gone(junk, back, away, soon, settings=("a", "b")) == []
    assert gone(junk, back, away, late, settings=("a", "b")) == [1, 2]


def test_what_is_loaded_and_unloaded() -> None:
    changes = [load(1, "a"), unload(2, "b"), unload(3, "a"), load(4, "b", plain=True), load(5, "c")]
    assert loaded(changes) == {"b", "c"}
    assert unloaded(changes) == {"a"}


def test_ids_are_compared_as_numbers() -> None:
    assert gone(unload(9, "a"), load(10, "a")) == [9]

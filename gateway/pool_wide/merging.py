"""One answer out of those of several replicas. Pure; documents are JSON as Triton writes it over HTTP."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from wire.changes import CallAnswer, CallProtocol

#: States of a model in a repository index, the one that a caller can use first. A model never loaded has none.
_STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE", None)


def statistics(documents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """``model_stats`` of several replicas: for each model and version counts and times summed, ``last_inference`` the
    newest, ``batch_stats`` by batch size. Of ``memory_usage`` every entry is kept: it belongs to one replica."""
    models: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        for model in document.get("model_stats", ()):
            key = (model.get("name", ""), model.get("version", ""))
            models[key] = _model_statistics(models[key], model) if key in models else model
    return {"model_stats": list(models.values())}


def _model_statistics(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = _summed(one, other)
    merged["last_inference"] = max(one.get("last_inference", 0), other.get("last_inference", 0))
    sizes: dict[int, dict[str, Any]] = {}
    for entry in (*one.get("batch_stats", ()), *other.get("batch_stats", ())):
        size = entry["batch_size"]
        sizes[size] = _summed(sizes[size], entry) | {"batch_size": size} if size in sizes else entry
    merged["batch_stats"] = [sizes[size] for size in sorted(sizes)]
    if "memory_usage" in one or "memory_usage" in other:
        merged["memory_usage"] = [*one.get("memory_usage", ()), *other.get("memory_usage", ())]
    return merged


def _summed(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Numbers added, at every depth; of anything else that of ``one``."""
    merged = dict(one)
    for key, value in other.items():
        if key not in one:
            merged[key] = value
        elif isinstance(value, dict):
            merged[key] = _summed(one[key], value)
        elif isinstance(value, int):
            merged[key] = one[key] + value
    return merged


def index(documents: Iterable[Sequence[dict[str, str]]]) -> list[dict[str, str]]:
    """Repository indexes united: a model (and version) is in the best state that it has anywhere; the reason why it is
    in a worse one elsewhere is kept."""
    entries: dict[tuple[str, str], list[dict[str, str]]] = {}
    for document in documents:
        for entry in document:
            entries.setdefault((entry["name"], entry.get("version", "")), []).append(entry)
    loaded = {name for (name, version), same in entries.items() if version or any("state" in each for each in same)}
    merged = []
    for (name, version), same in sorted(entries.items()):
        if name in loaded and not version and not any("state" in each for each in same):
            continue  # one replica never loaded what another has
        best = min(same, key=lambda entry: _STATES.index(entry.get("state")))
        reason = best.get("reason") or next((each["reason"] for each in same if each.get("reason")), None)
        merged.append(best if reason is None else best | {"reason": reason})
    return merged


def regions(documents: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Registered regions of shared memory, each once."""
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        for region in document:
            found.setdefault(region["name"], region)
    return [found[name] for name in sorted(found)]


def agreed(answers: Sequence[CallAnswer], protocol: CallProtocol) -> CallAnswer:
    """The answer to a change that several replicas made: Triton's own where they agree; where one fails, the first
    failure in Triton's own words, and for how many replicas it holds."""
    failed = [answer for answer in answers if not answer.well]
    if not failed or all(_said(answer) == _said(failed[0]) for answer in answers):
        return (failed or answers)[0]
    alike = sum(_said(answer) == _said(failed[0]) for answer in failed)
    return in_words(failed[0], f"{words(failed[0])} (on {alike} of {len(answers)} replicas)", protocol)


def words(answer: CallAnswer) -> str:
    """What a failure says."""
    if answer.unreachable is not None:
        return answer.unreachable
    try:
        return str(json.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError):
        return answer.details or f"status {answer.status}"


def in_words(answer: CallAnswer, sentence: str, protocol: CallProtocol) -> CallAnswer:
    """A failure in other words."""
    if answer.unreachable is not None:
        return answer.model_copy(update={"unreachable": sentence})
    if protocol is CallProtocol.GRPC:
        return answer.model_copy(update={"details": sentence})
    return answer.model_copy(update={"body": json.dumps({"error": sentence}, separators=(",", ":")).encode()})


def _said(answer: CallAnswer) -> tuple[int, bytes, str, str | None]:
    return answer.status, answer.body, answer.details, answer.unreachable

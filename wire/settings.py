"""The base of every settings model, and how errors in settings are told."""

import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class SettingsModel(BaseModel):
    """Immutable; unknown keys are refused; every field carries a sentence of documentation (and its unit)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """One thing wrong in one file: where, which rule, and the value that breaks it."""

    file: str
    key: str
    rule: str
    value: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.rule} (was: {self.value})"


class SettingsError(Exception):
    """All problems of all settings files at once."""

    def __init__(self, problems: list[SettingsProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def problems_of(file: str, error: ValidationError) -> list[SettingsProblem]:
    """A pydantic error as problems of ``file``: one per broken rule, secrets not shown."""
    problems = []
    for detail in error.errors(include_url=False):
        key = ".".join(str(part) for part in detail["loc"]) or "(file)"
        rule = (
            "unknown key" if detail["type"] == "extra_forbidden" else str(detail["msg"]).removeprefix("Value error, ")
        )
        problems.append(SettingsProblem(file, key, rule, _shown(key, detail.get("input"))))
    return problems


def _shown(key: str, value: Any) -> str:
    # A store URL may carry a password, and a wrong one is exactly when it would be printed.
    if any(word in key for word in ("url", "password", "secret", "token", "key")):
        return "***"
    text = re.sub(r"://\S*@", "://***@", repr(value))
    return text if len(text) <= 80 else text[:77] + "..."

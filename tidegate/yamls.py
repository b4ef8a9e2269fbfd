"""YAML files as plain data, strictly: what a lenient reader would let pass in silence is a problem here."""

from pathlib import Path
from typing import Any

import yaml

from wire.settings import SettingsProblem

# The C parser is some ten times faster; the replica's start is part of a caller's wait.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, *, shown: str | None = None) -> tuple[dict[str, Any], list[SettingsProblem]]:
    """The mapping in ``path`` and what is wrong with the file; problems name it ``shown``. An empty file is empty."""
    shown = shown or path.name
    try:
        loader = _Loader(path.read_bytes())
    except OSError as error:
        return {}, [SettingsProblem(shown, "(file)", f"cannot be read: {error.strerror}", str(path))]
    except yaml.YAMLError as error:
        return {}, [_syntax(shown, error)]
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, []
        if not isinstance(node, yaml.MappingNode):
            return {}, [SettingsProblem(shown, "(file)", "must be a mapping of keys to values", node.tag)]
        problems = _doubled(shown, node, "")
        data = loader.construct_document(node)
        return {str(key): value for key, value in data.items()}, problems
    except yaml.YAMLError as error:
        return {}, [_syntax(shown, error)]
    except (ValueError, RecursionError, TypeError) as error:
        return {}, [SettingsProblem(shown, "(file)", f"cannot be understood: {error}", path.name)]
    finally:
        loader.dispose()


def _syntax(shown: str, error: yaml.YAMLError) -> SettingsProblem:
    mark = getattr(error, "problem_mark", None)
    place = "(file)" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
    words = getattr(error, "problem", None) or str(error).splitlines()[0]
    return SettingsProblem(shown, place, "is not YAML", str(words))


def _doubled(shown: str, node: yaml.Node, path: str) -> list[SettingsProblem]:
    """Keys given twice: YAML readers keep the last one and say nothing."""
    problems: list[SettingsProblem] = []
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            here = f"{path}.{name}" if path else name
            line = key.start_mark.line + 1
            if name in seen:
                rule = "this key is given twice"
                problems.append(SettingsProblem(shown, here, rule, f"lines {seen[name]} and {line}"))
            seen.setdefault(name, line)
            problems += _doubled(shown, value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            problems += _doubled(shown, item, f"{path}.{index}")
    return problems

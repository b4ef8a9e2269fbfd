"""Settings: read together, told together, documented, and shipped as they are by default."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from stores.settings import StoreSettings
from tidegate.settings import SystemSettings, load
from tidegate.yamls import read_yaml
from wire.pools import PoolSettings
from wire.settings import SettingsError

ROOT = Path(__file__).parents[2]


def write(folder: Path, system: str = "", pools: dict[str, str] | None = None) -> Path:
    """A settings folder: tidegate.yaml, and pools whose models all have their directory."""
    for name, text in (pools if pools is not None else {"vision": "models: [{name: reader}]"}).items():
        pool = folder / "deployments" / name
        pool.mkdir(parents=True)
        (pool / "pool.yaml").write_text(text)
        for model in ("reader", "writer"):
            (pool / "models" / model).mkdir(parents=True)
            (pool / "models" / model / "config.pbtxt").write_text("")
    path = folder / "tidegate.yaml"
    path.write_text(system)
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        load(path)
    return [str(problem) for problem in raised.value.problems]


def test_an_empty_file_means_defaults_with_absolute_paths(tmp_path: Path) -> None:
    loaded = load(write(tmp_path))
    assert loaded.system.gateway == SystemSettings().gateway
    assert loaded.state_dir == tmp_path / ".tidegate"
    assert loaded.repository("vision") == tmp_path / "deployments/vision/models"
    assert list(loaded.pools) == ["vision"]


def test_errors_of_all_files_are_told_at_once_with_file_key_rule_and_value(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "gateway: {http_port: 99999, colour: red}\nqueues: {scan: {handler: a.b:c, pools: [nowhere]}}",
        {"vision": "models: [{name: reader}, {name: ghost}]\nscaling: {min_replicas: 3, max_replicas: 2}"},
    )
    told = problems(path)
    assert f"{path}: gateway.http_port: Input should be less than or equal to 65535 (was: 99999)" in told
    assert f"{path}: gateway.colour: unknown key (was: 'red')" in told
    assert any("queues.scan.pools: names a pool that does not exist (known: vision) (was: nowhere)" in t for t in told)
    assert any(t.startswith("deployments/vision/pool.yaml: scaling: min_replicas must not be above") for t in told)
    assert any("models.1.name: the model repository has no models/ghost/config.pbtxt (was: ghost)" in t for t in told)
    assert len(told) == 5


def test_a_syntax_error_hides_no_error_of_another_file(tmp_path: Path) -> None:
    told = problems(write(tmp_path, "gateway: {http_port: 1", {"vision": "models: []"}))
    assert any("tidegate.yaml: line " in t and "is not YAML" in t for t in told)
    assert any(t.startswith("deployments/vision/pool.yaml: models:") for t in told)


@pytest.mark.parametrize("content", [b"gateway: {http_port: 1", b"\x00\xff\x81\x02", b"- a list", None])
def test_of_a_file_that_cannot_be_read_only_that_is_told(tmp_path: Path, content: bytes | None) -> None:
    """A syntax error, a binary file, no mapping, a folder: one problem, and of the file that was named."""
    path = tmp_path / "node.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    (told,) = problems(path)
    assert told.startswith(f"{path}: ")


def test_problems_name_the_file_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("")
    (told,) = problems(path)
    assert told.startswith(f"{path}: deployments_dir: there is no pool")


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://hunter2", "must begin with redis://, rediss:// or unix://"),
        ("hunter2:6379", "must begin with"),
        ("redis://", "must name a host"),
        ("redis://hunter2:port/0", "cannot be understood as a URL"),
        ("redis://:hunter2#3@host:1/0", "cannot be understood as a URL"),
        ("redis://host/0#hunter2", "must not hold a bare #"),
        ("redis://host/hunter2", "must end with the number of a database"),
        ("redis://host/0?hunter2=1", "has an option after the ?"),
        ("redis://host/0?socket_timeout=hunter2", "has an option after the ?"),
        ("unix://", "must name the socket's path"),
    ],
)
def test_a_store_url_that_cannot_be_used_is_a_problem_like_any_other(tmp_path: Path, url: str, rule: str) -> None:
    """Told with the others, its value not shown."""
    told = problems(write(tmp_path, f"store: {{url: '{url}'}}\ngateway: {{http_port: 0, grpc_port: 6390}}"))
    assert len(told) == 2
    (one,) = [problem for problem in told if "store.url" in problem]
    assert rule in one and one.endswith("(was: ***)") and "hunter2" not in one


@pytest.mark.parametrize(
    "url",
    ["redis://h", "redis://:p%23w@h:1/2", "rediss://u:p@[::1]:1/0?ssl_cert_reqs=none", "unix:///run/redis.sock?db=1"],
)
def test_store_urls_that_can_be_used(url: str) -> None:
    assert StoreSettings.model_validate({"url": url}).resolved_url == url


def test_keys_given_twice_are_refused(tmp_path: Path) -> None:
    told = problems(write(tmp_path, "store:\n  key_prefix: a\n  key_prefix: b\nstore: {}\n"))
    assert any("store.key_prefix: this key is given twice (was: lines 2 and 3)" in t for t in told)
    assert any("store: this key is given twice (was: lines 1 and 4)" in t for t in told)


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("gateway: {http_port: 7000, control_port: 7000}", "gateway.control_port: this port is gateway.http_port"),
        ("gateway: {grpc_port: 6390}", "store.embedded_port: this port is gateway.grpc_port already"),
        ("- a list", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("7: seven", "7: unknown key"),
        ("deployments_dir: elsewhere", "there is no pool"),
        ("queues: {bad name!: {handler: a:b, pools: [vision]}}", "queues.bad name!"),
        ("queues: {scan: {pools: [vision]}}", "queues.scan.handler: Field required"),
        ("gateway: null", "gateway: Input should be"),
    ],
)
def test_broken_rules(tmp_path: Path, system: str, expected: str) -> None:
    assert any(expected in told for told in problems(write(tmp_path, system)))


def test_an_external_store_frees_the_embedded_port(tmp_path: Path) -> None:
    assert (
        load(write(tmp_path, "store: {url: 'redis://h'}\ngateway: {grpc_port: 6390}")).system.gateway.grpc_port == 6390
    )


def test_a_model_is_served_by_one_pool_only(tmp_path: Path) -> None:
    told = problems(write(tmp_path, "", {"a": "models: [{name: reader}]", "vision": "models: [{name: reader}]"}))
    assert told == [
        "deployments/vision/pool.yaml: models: a model may be served by one pool only; pool a has it too (was: reader)"
    ]


def test_a_named_file_must_exist_and_the_default_one_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(tmp_path / "none.yaml") == [
        f"{tmp_path}/none.yaml: (file): no such file (was: {tmp_path}/none.yaml)"
    ]
    write(tmp_path).unlink()
    monkeypatch.chdir(tmp_path)
    assert load().config_path == tmp_path / "tidegate.yaml"
    assert load(tmp_path / "tidegate.yaml", must_exist=False).system.workers.processes == 1


@pytest.mark.parametrize(
    "system",
    [
        "store: 'redis://:hunter2@host:1/0'",
        "store: {url: [redis://:hunter2@host]}",
        "store: {uri: 'redis://user:hunter2@host'}",
        "store: {url: 'redis://:hunter2@host', key_prefix: 'a b'}",
        "stores: {uri: 'redis://user:hunter2@host'}",
    ],
)
def test_secrets_are_not_printed(tmp_path: Path, system: str) -> None:
    assert "hunter2" not in "".join(problems(write(tmp_path, system)))


def test_secrets_are_not_in_the_repr_or_the_dump() -> None:
    settings = StoreSettings.model_validate({"url": "redis://:hunter2@host"})
    assert "hunter2" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.resolved_url == "redis://:hunter2@host"


def test_the_shipped_files_equal_the_defaults_and_show_every_field() -> None:
    raw, wrong = read_yaml(ROOT / "tidegate.yaml")
    assert not wrong
    assert SystemSettings.model_validate(raw) == SystemSettings()
    assert set(keys(raw)) == set(keys(SystemSettings().model_dump(mode="json")))
    raw, wrong = read_yaml(ROOT / "deployments/vision/pool.yaml")
    assert not wrong
    pool = PoolSettings.model_validate(raw)
    assert pool == PoolSettings(models=pool.models)
    assert set(keys(raw)) == set(keys(pool.model_dump(mode="json")))


def test_each_field_of_the_shipped_file_carries_its_sentence() -> None:
    """The comment above a field is its documentation; only a repeated queue does without."""
    lines = (ROOT / "tidegate.yaml").read_text().splitlines()
    bare = [
        line.strip()
        for above, line in pairwise(lines)
        if line.strip() and not line.lstrip().startswith("#") and not above.lstrip().startswith("#")
    ]
    seen = bare.index("segcls:")
    assert bare[:seen] == ["segment:"]
    text = " ".join((ROOT / "tidegate.yaml").read_text().replace("#", " ").split())
    for model in models_of(SystemSettings):
        for name, field in model.model_fields.items():
            sentence = " ".join((field.description or "").replace("``", "").split())
            assert sentence in text.replace("`", ""), f"{model.__name__}.{name}"


@pytest.mark.parametrize("model", [SystemSettings, PoolSettings])
def test_every_field_has_a_sentence_and_numbers_have_a_unit(model: type[BaseModel]) -> None:
    for each in models_of(model):
        for name, field in each.model_fields.items():
            assert field.description, f"{each.__name__}.{name}"
            assert field.description.endswith(".")
            if field.annotation in (int, float):
                assert "Unit: " in field.description, f"{each.__name__}.{name}"


@pytest.mark.parametrize("what", ["system", "pool"])
def test_schema_is_json_schema_with_descriptions(what: str) -> None:
    command = [sys.executable, "-m", "tidegate", "schema", what]
    schema = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)
    assert schema["additionalProperties"] is False
    for definition in [schema, *schema["$defs"].values()]:
        for name, field in definition.get("properties", {}).items():
            target = field.get("$ref", "").rpartition("/")[2]
            assert field.get("description") or schema["$defs"][target]["description"], name


def models_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """``model`` and every settings model inside it."""
    yield model
    for field in model.model_fields.values():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from models_of(inner)


def keys(data: Any, path: str = "") -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield f"{path}.{key}"
            yield from keys(value, f"{path}.{key}")


def test_yaml_files_stay_readable_by_any_reader() -> None:
    assert yaml.safe_load((ROOT / "tidegate.yaml").read_text())["gateway"]["http_port"] == 8000

"""API keys: who is let in, what an operator's role adds, and that a key is kept nowhere."""

import pytest

from gateway.access import Access, digest, is_own_key, new_key
from gateway.ingress.http_wire import read_request
from gateway.ingress.rpc_calls import read_call
from gateway.settings import ApiKeySettings, GatewaySettings, Role
from wire.errors import ErrorKind, TidegateError

CALLER, OPERATOR = new_key(), new_key()
ACCESS = Access(
    [
        ApiKeySettings(tenant="scans", sha256=digest(CALLER.encode())),
        ApiKeySettings(tenant="ops", sha256=digest(OPERATOR.encode()), role=Role.OPERATOR),
    ]
)


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def refusal(authorization: bytes, *, operator: bool = False) -> ErrorKind:
    with pytest.raises(TidegateError) as raised:
        ACCESS.tenant(authorization, operator=operator)
    return raised.value.kind


def test_a_known_key_names_its_tenant_and_the_word_bearer_is_known_in_any_case() -> None:
    assert ACCESS.tenant(bearer(CALLER), operator=False) == "scans"
    assert ACCESS.tenant(bearer(OPERATOR), operator=True) == "ops"
    assert ACCESS.tenant(b"bearer " + CALLER.encode(), operator=False) == "scans"


@pytest.mark.parametrize(
    "authorization",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer tidegate_",
        bearer(new_key()),
        bearer(CALLER)[:-1],
        bearer(CALLER) + b" ",
        b"Basic " + CALLER.encode(),
        CALLER.encode(),
        b"Bearer " + digest(CALLER.encode()).encode(),
        b"Bearer tidegate_\xff\x00",
    ],
)
def test_anything_else_is_unauthenticated(authorization: bytes) -> None:
    assert refusal(authorization) is ErrorKind.UNAUTHENTICATED
    assert refusal(authorization, operator=True) is ErrorKind.UNAUTHENTICATED


def test_what_is_for_operators_is_forbidden_to_callers() -> None:
    assert refusal(bearer(CALLER), operator=True) is ErrorKind.FORBIDDEN


def test_without_keys_everybody_may_do_everything() -> None:
    assert Access([]).tenant(b"", operator=True) == ""


def test_keys_are_all_different_and_the_settings_do_not_hold_them() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(is_own_key(bearer(key)) and len(key) > 50 for key in keys)
    settings = GatewaySettings(api_keys=(ApiKeySettings(tenant="a", sha256=digest(CALLER.encode())),))
    assert CALLER not in settings.model_dump_json()


def test_our_keys_are_not_sent_on_and_others_credentials_are() -> None:
    """A replica, or a model that reads headers, sees what is meant for it and nothing that opens the gateway."""

    def http(value: bytes) -> tuple[bytes, bytes]:
        found = read_request(b"GET /v2 HTTP/1.1\r\nHost: a\r\nAuthorization: %b\r\n\r\n" % value, 1000)
        assert found is not None
        return found[0].authorization, found[0].upstream_head

    def grpc(value: bytes) -> tuple[bytes, bytes]:
        pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x")]
        head = read_call([*pseudo, (b"content-type", b"application/grpc"), (b"authorization", value)])
        return head.authorization, head.block

    for read in (http, grpc):
        key, sent_on = read(bearer(CALLER))
        assert key == bearer(CALLER)
        assert b"uthorization" not in sent_on
        key, sent_on = read(b"Basic dXNlcjpwdw==")
        assert key == b""
        assert b"Basic dXNlcjpwdw==" in sent_on

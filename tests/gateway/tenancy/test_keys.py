from __future__ import annotations

import hashlib
import hmac

import pytest

from loramux.errors import InvalidRequest
from loramux.gateway.tenancy.keys import check_tenant_id, key_hash, new_key, parse_key, tenant_salt


def test_a_new_key_names_its_tenant_and_parses() -> None:
    new = new_key("acme-1")
    assert parse_key(new.key) == ("acme-1", new.id)
    assert new.hash == hashlib.sha256(new.key.encode()).hexdigest() == key_hash(new.key)
    assert new_key("acme-1").key != new.key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-123",
        "lmx_acme.00000000_" + "f" * 63,
        "lmx_acme.00000000_" + "F" * 64,
        "lmx_ACME.00000000_" + "f" * 64,
        "lmx_a}b.00000000_" + "f" * 64,
        "lmx_acme.00000000_" + "f" * 64 + "\n",
        "lmx_admin.00000000_" + "f" * 64,
    ],
)
def test_anything_else_is_no_tenants_key(text: str) -> None:
    assert parse_key(text) is None


@pytest.mark.parametrize("tenant_id", ["", "-a", "A", "a_b", "a" * 64, "a}b", "é", "admin", "a\n"])
def test_tenant_ids_outside_the_grammar(tenant_id: str) -> None:
    with pytest.raises(InvalidRequest):
        check_tenant_id(tenant_id)


def test_salt_is_an_hmac_over_length_delimited_fields() -> None:
    secret = b"s" * 32
    message = b"\0\0\0\x15loramux tenant salt 1" + b"\0\0\0\x04acme" + b"\0\0\0\x08" + (7).to_bytes(8, "big")
    assert tenant_salt(secret, "acme", 7) == hmac.new(secret, message, hashlib.sha256).digest()
    assert (
        len({tenant_salt(secret, "acme", 7), tenant_salt(secret, "acme", 8), tenant_salt(secret, "acm", 7), tenant_salt(b"", "acme", 7)})
        == 4
    )

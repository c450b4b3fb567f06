"""A client's mistake is the contract's error, never a 500, and the server keeps serving."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import World
from tests.lora.random_adapters import write_random_adapter

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(autouse=True)
def _still_serving(world: World) -> Any:
    yield
    answer = httpx.post(f"{world.server.url}/v1/chat/completions", json=CHAT, headers=_bearer(world.acme_key), timeout=60)
    assert answer.status_code == 200


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _post(world: World, path: str, *, key: str | None = None, **kwargs: Any) -> httpx.Response:
    return httpx.post(f"{world.server.url}{path}", headers=_bearer(key or world.acme_key), timeout=60, **kwargs)


def _assert_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code and error["message"] and error["type"]
    assert error["request_id"] == response.headers["x-request-id"]
    assert param is None or error["param"] == param
    return error


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b'{"model": "tiny", "messages": [}', b"\xff\xfe", b'{"a":' * 5000])
def test_malformed_json(world: World, body: bytes) -> None:
    response = _post(world, "/v1/chat/completions", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "/temperature"),
        ({"temperature": "hot"}, "/temperature"),
        ({"top_p": -0.1}, "/top_p"),
        ({"top_p": 1.5}, "/top_p"),
        ({"n": 0}, "/n"),
        ({"max_tokens": 0}, "/max_tokens"),
        ({"max_tokens": 1.5}, "/max_tokens"),
        ({"presence_penalty": 3}, "/presence_penalty"),
        ({"repetition_penalty": 0}, "/repetition_penalty"),
        ({"top_logprobs": 3}, "/top_logprobs"),
        ({"logit_bias": {"x": 1}}, None),
        ({"messages": []}, "/messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, None),
        ({"stream_options": {"include_usage": True}}, "/stream_options"),
        ({"response_format": {"type": "json_schema"}}, None),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None),
    ],
)
def test_values_out_of_range(world: World, changes: dict[str, Any], param: str | None) -> None:
    response = _post(world, "/v1/chat/completions", json={**CHAT, **changes})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "tools_v2", "best_effort", "functions", "enforcment"])
def test_unknown_fields_that_could_matter(world: World, field: str) -> None:
    _assert_error(_post(world, "/v1/chat/completions", json={**CHAT, field: {"x": 1}}), 400, "unsupported_parameter", f"/{field}")


def test_a_stop_beside_a_constraint_is_refused(world: World) -> None:
    body = {**CHAT, "response_format": {"type": "json_object"}, "stop": ["}"]}
    _assert_error(_post(world, "/v1/chat/completions", json=body), 400, "unsupported_parameter", "/stop")


def test_ignorable_fields_are_ignored(world: World) -> None:
    assert _post(world, "/v1/chat/completions", json={**CHAT, "user": "u", "metadata": {"a": "b"}, "store": False}).status_code == 200


def test_over_long_prompt(world: World) -> None:
    _assert_error(
        _post(world, "/v1/completions", json={"model": "tiny", "prompt": [5] * 9000, "max_tokens": 1}), 400, "context_length_exceeded"
    )


@pytest.mark.parametrize("model", ["tiny:nobody", "tiny:alpha@9", "tiny:alpha@nope", "tiny:../alpha", "tiny:", ":alpha", "TINY", "x" * 300])
def test_unknown_models(world: World, model: str) -> None:
    _assert_error(_post(world, "/v1/chat/completions", json={**CHAT, "model": model}), 404, "model_not_found")


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer lmx_acme.00000000_" + "f" * 64}, {"Authorization": "Basic x"}]
)
def test_wrong_keys(world: World, header: dict[str, str]) -> None:
    response = httpx.post(f"{world.server.url}/v1/chat/completions", json=CHAT, headers=header)
    _assert_error(response, 401, "invalid_api_key")
    assert "ffff" not in response.text


def test_a_tenant_key_is_no_admin_key(world: World) -> None:
    _assert_error(_post(world, "/admin/v1/tenants", json={"id": "mine"}), 403, "insufficient_scope")


def test_unknown_route_and_method(world: World) -> None:
    assert _post(world, "/v1/nothing", json={}).json()["error"]["code"] == "not_found"
    response = httpx.delete(f"{world.server.url}/v1/models", headers=_bearer(world.acme_key))
    assert response.status_code == 405 and response.json()["error"]["code"] == "method_not_allowed"


def _register(world: World, directory: Path) -> httpx.Response:
    body = {"base": "tiny", "source": {"uri": f"file:{directory}"}, "tenants": ["*"]}
    return world.server.admin("POST", f"/adapters/{directory.name}/versions", json=body)


def _spoilt(world: World, name: str) -> Path:
    return write_random_adapter(world.adapters["alpha"].parent / name, world.model, rank=4, modules=("q_proj",), seed=9)


def _edit_config(directory: Path, **changes: object) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_rank_zero(world: World) -> None:
    directory = _spoilt(world, "rank-zero")
    _edit_config(directory, r=0)
    error = _assert_error(_register(world, directory), 422, "adapter_invalid")
    assert error["details"]["report"]["errors"]


def test_dora_is_refused_by_name(world: World) -> None:
    directory = _spoilt(world, "dora")
    _edit_config(directory, use_dora=True)
    error = _assert_error(_register(world, directory), 422, "adapter_invalid")
    assert any("use_dora" in text for text in error["details"]["report"]["errors"])


def test_pickle(world: World) -> None:
    directory = _spoilt(world, "pickle")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    assert "pickle" in _assert_error(_register(world, directory), 422, "adapter_invalid")["message"]


def test_truncated_tensors(world: World) -> None:
    directory = _spoilt(world, "truncated")
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    _assert_error(_register(world, directory), 422, "adapter_invalid")


def test_header_longer_than_the_file(world: World) -> None:
    directory = _spoilt(world, "header")
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    _assert_error(_register(world, directory), 422, "adapter_invalid")


def test_another_models_shape(world: World) -> None:
    directory = write_random_adapter(
        world.adapters["alpha"].parent / "other-shape", world.model, rank=4, modules=("q_proj",), seed=9, in_features_delta=8
    )
    error = _assert_error(_register(world, directory), 422, "adapter_invalid")
    assert any("q_proj" in text for text in error["details"]["report"]["errors"])


def test_a_path_outside_the_root(world: World, tmp_path: Path) -> None:
    outside = write_random_adapter(tmp_path / "outside", world.model, rank=4, modules=("q_proj",), seed=9)
    link = world.adapters["alpha"].parent / "link"
    link.symlink_to(outside)
    for uri in (f"file:{outside}", f"file:{link}", f"file:{link.parent}/../outside", "file:/etc"):
        body = {"base": "tiny", "source": {"uri": uri}, "tenants": ["*"]}
        response = world.server.admin("POST", "/adapters/outside/versions", json=body)
        assert response.status_code in (400, 422), response.text
    assert world.server.admin("GET", "/adapters/outside").status_code == 404


@pytest.mark.parametrize("name", ["..%2f..%2fetc", "UPPER", "a" * 64, "-x", "a b"])
def test_adapter_names_outside_the_grammar(world: World, name: str) -> None:
    body = {"base": "tiny", "source": {"uri": f"file:{world.adapters['alpha']}"}, "tenants": ["*"]}
    assert world.server.admin("POST", f"/adapters/{name}/versions", json=body).status_code in (400, 404)

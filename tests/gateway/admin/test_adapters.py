from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loramux.adapters.identity import content_digest
from tests.gateway.admin.adapters import write_adapter
from tests.gateway.served import Served, error_of, served


async def _register(app: Served, directory: Path, name: str = "tickets", tenants: list[str] | None = None, **source: Any) -> httpx.Response:
    body = {"base": "tiny", "source": {"uri": f"file:{directory}", **source}, "tenants": tenants or []}
    return await app.admin("POST", f"/adapters/{name}/versions", json=body)


def _files(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}


async def _upload(app: Served, files: dict[str, bytes], name: str = "tickets", **fields: str) -> httpx.Response:
    return await app.admin("POST", f"/adapters/{name}/versions", data={"base": "tiny", **fields}, files=files)


async def test_versions_of_an_adapter(app: Served) -> None:
    key = await app.new_key("acme")
    one, two = write_adapter(app.root / "one", seed=1), write_adapter(app.root / "two", seed=2, rank=8)
    first = await _register(app, one, tenants=["acme"])
    assert first.status_code == 201
    body = first.json()
    assert (body["id"], body["version"], body["state"], body["source"]) == ("tickets@1", 1, "ready", f"file:{one}")
    files = _files(one)
    assert body["digest"] == content_digest(files["adapter_config.json"], files["adapter_model.safetensors"])
    report = body["report"]
    assert (report["tensors_matched"], report["tensors_total"], report["rank"], report["scale"]) == (8, 8, 4, 2.0)
    again = await _register(app, one)
    assert again.status_code == 200 and again.json()["version"] == 1
    assert (await _register(app, two)).json()["version"] == 2
    shown = (await app.admin("GET", "/adapters/tickets")).json()
    assert shown["aliases"] == {"prod": 1} and shown["tenants"] == ["acme"] and [each["version"] for each in shown["versions"]] == [1, 2]
    assert (await app.admin("GET", "/adapters")).json()["data"] == [shown]
    assert (await app.admin("GET", "/adapters/tickets/versions/2")).json()["report"]["rank"] == 8
    assert [model["id"] for model in (await app.call("GET", "/v1/models", key)).json()["data"]] == ["tiny", "tiny:tickets"]
    error_of(await app.admin("DELETE", "/adapters/tickets/versions/1"), 409, "conflict")
    assert (await app.admin("PUT", "/adapters/tickets/aliases/prod", json={"version": 2})).json() == {"alias": "prod", "version": 2}
    assert (await app.admin("DELETE", "/adapters/tickets/versions/1")).status_code == 204
    error_of(await app.admin("GET", "/adapters/tickets/versions/1"), 404, "not_found")
    assert (await app.admin("PUT", "/adapters/tickets/grants", json={"tenants": []})).json() == {"tenants": []}
    assert [model["id"] for model in (await app.call("GET", "/v1/models", key)).json()["data"]] == ["tiny"]
    assert (await app.admin("DELETE", "/adapters/tickets")).status_code == 204
    error_of(await app.admin("GET", "/adapters/tickets"), 404, "not_found")


async def test_an_upload_is_kept_over_a_restart_without_its_files(store_url: str, tmp_path: Path) -> None:
    files = _files(write_adapter(tmp_path / "elsewhere"))
    async with served(store_url, tmp_path) as app:
        key = await app.new_key("acme")
        made = await _upload(app, files, tenants='["acme"]')
        assert made.status_code == 201 and made.json()["source"] == "upload"
    async with served(store_url, tmp_path) as app:
        version = (await app.admin("GET", "/adapters/tickets/versions/1")).json()
        assert version == made.json()
        assert tuple(app.services.contents.get(version["digest"])) == tuple(files.values())
        assert [model["id"] for model in (await app.call("GET", "/v1/models", key)).json()["data"]] == ["tiny", "tiny:tickets"]


async def test_adapters_of_another_base_are_not_listed(app: Served) -> None:
    key = await app.new_key("acme")
    assert (await _register(app, write_adapter(app.root / "one"), tenants=["acme"])).status_code == 201
    info = app.engine._info
    other = msgspec.structs.replace(info.base, digest="sha256:" + "f" * 64)
    app.engine._info = msgspec.structs.replace(info, base=other)
    assert [model["id"] for model in (await app.call("GET", "/v1/models", key)).json()["data"]] == ["tiny"]
    error_of(await app.call("GET", "/v1/models/tiny:tickets", key), 404, "model_not_found")


async def test_the_same_bytes_from_a_file_and_from_an_upload_are_one_version(app: Served) -> None:
    directory = write_adapter(app.root / "one")
    assert (await _register(app, directory)).status_code == 201
    assert (await _upload(app, _files(directory))).status_code == 200


async def test_the_given_sha256_must_match(app: Served) -> None:
    directory = write_adapter(app.root / "one")
    actual = hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()
    error_of(await _register(app, directory, sha256="0" * 64), 422, "adapter_invalid")
    error_of(await _register(app, directory, sha256="xyz"), 400, "invalid_request")
    assert (await _register(app, directory, sha256=actual)).status_code == 201


async def test_what_can_not_be_served_is_refused_with_its_report(app: Served) -> None:
    cases = {
        "rank": write_adapter(app.root / "rank", r=0),
        "in_features": write_adapter(app.root / "shape", in_features=24),
        "limit": write_adapter(app.root / "large", rank=65),
        "use_dora": write_adapter(app.root / "dora", use_dora=True),
    }
    for name, directory in cases.items():
        for response in (await _register(app, directory, "bad"), await _upload(app, _files(directory), "bad")):
            report = error_of(response, 422, "adapter_invalid")["details"]["report"]
            assert report["errors"], name
    error_of(await app.admin("GET", "/adapters/bad"), 404, "not_found")
    assert app.services.contents.digests() == set()


async def test_pickles_are_refused(app: Served) -> None:
    directory = write_adapter(app.root / "pickle")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    assert "pickle" in error_of(await _register(app, directory), 422, "adapter_invalid")["message"]
    config = (directory / "adapter_config.json").read_bytes()
    pickled = b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94."
    files = {"adapter_config.json": config, "adapter_model.bin": pickled}
    assert "pickle" in error_of(await _upload(app, files), 422, "adapter_invalid")["message"]
    files = {"adapter_config.json": config, "adapter_model.safetensors": pickled}
    error_of(await _upload(app, files), 422, "adapter_invalid")


async def test_only_the_roots_are_read(app: Served, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside")
    (app.root / "link").symlink_to(outside)
    inside = app.root / "inside"
    inside.mkdir()
    (inside / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for uri in (f"file:{outside}", f"file:{app.root}/link", f"file:{app.root}/../outside", "file:///etc", f"file:{inside}"):
        body = {"base": "tiny", "source": {"uri": uri}}
        assert error_of(await app.admin("POST", "/adapters/x/versions", json=body), 400, "invalid_request")["param"] == "/source/uri"
    for uri in ("https://example.com/a", "hf:org/name", "relative", "file:relative", "\0", "file://["):
        body = {"base": "tiny", "source": {"uri": uri}}
        error_of(await app.admin("POST", "/adapters/x/versions", json=body), 400, "invalid_request")
    error_of(await _register(app, app.root / ("a" * 300)), 422, "adapter_invalid")


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"),
    [
        ({"base": "other"}, 404, "model_not_found", "/base"),
        ({"base": 1}, 400, "invalid_request", "/base"),
        ({"source": {}}, 400, "invalid_request", "/source/uri"),
        ({"source": {"uri": "file:x", "token": "t"}}, 400, "unsupported_parameter", "/source/token"),
        ({"preload": {"tier": "gpu"}}, 400, "invalid_request", "/preload/tier"),
        ({"preload": {"tier": "host", "min_engines": 2}}, 400, "invalid_request", "/preload/min_engines"),
        ({"preload": {"tier": "host", "min_engines": 0}}, 400, "invalid_request", "/preload/min_engines"),
        ({"preload": {"engines": 1}}, 400, "unsupported_parameter", "/preload/engines"),
        ({"tenants": "acme"}, 400, "invalid_request", "/tenants"),
        ({"tenants": ["nobody"]}, 400, "invalid_request", "/tenants/0"),
        ({"tenants": ["*", "acme"]}, 400, "invalid_request", "/tenants"),
    ],
)
async def test_bad_registrations(app: Served, changes: dict[str, Any], status: int, code: str, param: str) -> None:
    body = {"base": "tiny", "source": {"uri": f"file:{write_adapter(app.root / 'one')}"}, **changes}
    assert error_of(await app.admin("POST", "/adapters/x/versions", json=body), status, code)["param"] == param


async def test_bad_uploads(app: Served) -> None:
    files = _files(write_adapter(app.root / "one"))
    config = {"adapter_config.json": files["adapter_config.json"]}
    assert error_of(await _upload(app, config), 422, "adapter_invalid")["param"] == "/adapter_model.safetensors"
    error_of(await _upload(app, {**files, "README.md": b"x"}), 400, "unsupported_parameter")
    error_of(await _upload(app, files, preload='{"tier": "gpu"}'), 400, "invalid_request")
    error_of(await _upload(app, files, tenants="[acme"), 400, "invalid_request")
    error_of(await _upload(app, files, tenants="acme"), 400, "invalid_request")
    error_of(await _upload(app, files, tenants="[" * 60_000), 400, "invalid_request")
    broken = {"content-type": "multipart/form-data; boundary=x"}
    error_of(await app.admin("POST", "/adapters/x/versions", content=b"--y\r\nnonsense", headers=broken), 400, "invalid_request")
    error_of(
        await app.admin("POST", "/adapters/x/versions", content=b"", headers={"content-type": "multipart/form-data"}),
        400,
        "invalid_request",
    )


async def test_bodies_that_are_not_json(app: Served) -> None:
    for content in (b"", b"{", b"[]", b"null", b"\xff"):
        error_of(await app.admin("POST", "/adapters/x/versions", content=content), 400, "invalid_request")


async def test_names_and_aliases_outside_the_grammar(app: Served) -> None:
    directory = write_adapter(app.root / "one")
    for name in ("UPPER", "a" * 64, "-x", "a b", "a}b"):
        error_of(await _register(app, directory, name), 400, "invalid_request")
    assert (await _register(app, directory, "..%2f..%2fetc")).status_code in (400, 404)
    await _register(app, directory)
    error_of(await app.admin("PUT", "/adapters/tickets/aliases/3", json={"version": 1}), 400, "invalid_request")
    error_of(await app.admin("PUT", "/adapters/tickets/aliases/beta", json={"version": 7}), 404, "not_found")
    for body in ({"previous": True}, {"split": [{"version": 1, "weight": 1}]}, {"version": 1, "split": []}):
        response = await app.admin("PUT", "/adapters/tickets/aliases/beta", json=body)
        assert response.status_code == 400 and response.json()["error"]["code"] in ("unsupported_parameter", "invalid_request")
    error_of(await app.admin("PUT", "/adapters/nobody/grants", json={"tenants": []}), 404, "not_found")
    error_of(await app.admin("GET", "/adapters/tickets/versions/x"), 400, "invalid_request")


async def test_without_an_engine_nothing_can_be_validated(app: Served) -> None:
    directory = write_adapter(app.root / "one")
    app.engine.die()
    error_of(await _register(app, directory), 503, "no_engine")
    assert (await app.admin("GET", "/engines")).json() == {"data": []}
    app.engine.revive()
    (engine,) = (await app.admin("GET", "/engines")).json()["data"]
    assert engine["engine_id"] == "fake-0" and engine["stats"]["num_running"] == 0 and engine["base"]["max_lora_rank"] == 64


async def test_an_upload_over_the_limit(store_url: str, tmp_path: Path) -> None:
    files = _files(write_adapter(tmp_path / "one"))
    async with served(store_url, tmp_path, max_adapter_mib=0.001, max_body_mib=0.0005) as app:
        error_of(await _upload(app, files), 413, "body_too_large")
        body = json.dumps({"base": "tiny", "source": {"uri": "file:" + "x" * 600}}).encode()
        error_of(await app.admin("POST", "/adapters/x/versions", content=body), 413, "body_too_large")

"""Preload, pin, drain and deletion: what the operator wants of an engine, and what it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.errors import EngineFailed
from tests.gateway.admin.adapters import write_adapter
from tests.gateway.served import Served, error_of, served

HOST = [{"engine": "fake-0", "tier": "host", "state": "ready", "pinned": False}]
DEVICE = [{"engine": "fake-0", "tier": "device", "state": "ready", "pinned": False}]
PINNED = [{"engine": "fake-0", "tier": "device", "state": "ready", "pinned": True}]
DRAINING = [{"engine": "fake-0", "tier": "device", "state": "draining", "pinned": False}]


async def _register(app: Served, name: str = "tickets", seed: int = 1, **fields: Any) -> httpx.Response:
    directory = write_adapter(app.root / str(seed), seed=seed)
    body = {"base": "tiny", "source": {"uri": f"file:{directory}"}, "tenants": ["*"], **fields}
    return await app.admin("POST", f"/adapters/{name}/versions", json=body)


async def _do(app: Served, action: str, body: Any = None, name: str = "tickets", number: int = 1) -> httpx.Response:
    return await app.admin("POST", f"/adapters/{name}/versions/{number}/{action}", json=body)


async def _version(app: Served, name: str = "tickets", number: int = 1) -> Any:
    return (await app.admin("GET", f"/adapters/{name}/versions/{number}")).json()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _in_flight(app: Served, model: str, key: str) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A request that the engine is answering, until the test has it resume."""
    before = len(app.engine.requests)
    app.engine.behaviour.hang_after = 3
    body = {"model": model, "prompt": "x", "max_tokens": 5}
    asking = asyncio.create_task(app.call("POST", "/v1/completions", key, json=body))
    await _until(lambda: len(app.engine.requests) > before)
    try:
        yield asking
    finally:
        app.engine.resume()
        async with asyncio.timeout(10):
            await asyncio.gather(asking, return_exceptions=True)


async def test_a_preloaded_version_is_where_it_was_asked_for(app: Served) -> None:
    assert (await _register(app)).json()["placements"] == []
    preloaded = await _do(app, "preload", {"tier": "host"})
    assert preloaded.status_code == 200 and preloaded.json()["placements"] == HOST
    preloaded = await _do(app, "preload")
    assert preloaded.json()["placements"] == DEVICE and preloaded.json()["id"] == "tickets@1"
    assert await _version(app) == preloaded.json()
    shown = (await app.admin("GET", "/adapters/tickets")).json()["versions"]
    assert [(each["placements"], each["in_flight"], each["rank"], each["bytes"]) for each in shown] == [(DEVICE, 0, 4, 2048)]
    (engine,) = (await app.admin("GET", "/engines")).json()["data"]
    digest = preloaded.json()["digest"]
    assert engine["adapters"] == [{"digest": digest, "tier": "device", "state": "ready", "pinned": False, "num_bytes": 64, "rank": 4}]


@pytest.mark.parametrize(("tier", "placements"), [("none", []), ("host", HOST), ("device", DEVICE)])
async def test_a_registration_that_preloads_is_answered_once_it_is_loaded(app: Served, tier: str, placements: Any) -> None:
    app.engine.load_s = 0.05
    made = await _register(app, preload={"tier": tier, "min_engines": 1})
    assert made.status_code == 201 and made.json()["placements"] == placements
    again = await _register(app, preload={"tier": tier})
    assert again.status_code == 200 and again.json()["placements"] == placements


async def test_an_upload_preloads_too(app: Served) -> None:
    directory = write_adapter(app.root / "one")
    files = {name: (directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    fields = {"base": "tiny", "preload": '{"tier": "host"}'}
    made = await app.admin("POST", "/adapters/tickets/versions", data=fields, files=files)
    assert made.status_code == 201 and made.json()["placements"] == HOST


async def test_a_load_that_takes_long_is_an_operation(app: Served) -> None:
    app.engine.load_s = 1.0
    started = await _register(app, preload={"tier": "device"})
    assert started.status_code == 202
    operation = started.json()
    assert operation == {"id": operation["id"], "kind": "preload", "target": "tickets@1", "state": "running", "error": None}
    assert started.headers["location"] == f"/admin/v1/operations/{operation['id']}"
    assert (await _version(app))["placements"] == [{"engine": "fake-0", "tier": "none", "state": "loading", "pinned": False}]

    async def state() -> str:
        return str((await app.admin("GET", f"/operations/{operation['id']}")).json()["state"])

    async with asyncio.timeout(10):
        while await state() == "running":
            await asyncio.sleep(0.05)
    assert await state() == "done" and (await _version(app))["placements"] == DEVICE
    error_of(await app.admin("GET", "/operations/op_0"), 404, "not_found")


async def test_an_operation_that_fails_says_why(app: Served) -> None:
    await _register(app)
    app.engine.load_s = 0.8
    started = await _do(app, "pin")
    assert started.status_code == 202
    app.engine.die()
    await _until(lambda: app.services.operations.get(started.json()["id"]).state != "running")
    failed = (await app.admin("GET", f"/operations/{started.json()['id']}")).json()
    assert failed["state"] == "failed" and failed["error"] == {"code": "no_engine", "message": "the engine was lost"}


async def test_what_an_engine_can_not_load_is_an_error(app: Served) -> None:
    await _register(app)
    app.engine.behaviour.refuse_place = EngineFailed("it broke")
    error_of(await _do(app, "preload"), 500, "engine_failed")
    app.engine.die()
    error_of(await _do(app, "preload"), 503, "no_engine")


async def test_pins_leave_one_slot(app: Served) -> None:
    for seed in range(1, 5):
        await _register(app, f"a{seed}", seed)
    for seed in range(1, 4):
        assert (await _do(app, "pin", name=f"a{seed}")).json()["placements"] == PINNED
    error_of(await _do(app, "pin", name="a4"), 409, "conflict")
    assert (await _do(app, "pin", {"tier": "host"}, name="a4")).json()["placements"][0]["pinned"] is True
    assert (await _do(app, "pin", {"pinned": False}, name="a1")).json()["placements"] == DEVICE
    assert (await _do(app, "pin", name="a4")).json()["placements"] == PINNED
    error_of(await _do(app, "pin", {"pinned": "no"}), 400, "invalid_request")
    error_of(await _do(app, "pin", {"tier": "none"}), 400, "invalid_request")
    error_of(await _do(app, "preload", {"pinned": True}), 400, "unsupported_parameter")


async def test_unknown_versions(app: Served) -> None:
    await _register(app)
    for action in ("preload", "pin", "drain"):
        error_of(await _do(app, action, number=7), 404, "not_found")
        error_of(await _do(app, action, name="nothing"), 404, "not_found")
    error_of(await _do(app, "pin", {"pinned": False}, number=7), 404, "not_found")


async def test_a_restarted_engine_gets_what_is_wanted_again(app: Served) -> None:
    await _register(app, "pinned", 1)
    await _register(app, "loaded", 2, preload={"tier": "host"})
    await _register(app, "neither", 3)
    await _do(app, "pin", name="pinned")
    app.engine.die()
    assert (await _version(app, "pinned"))["placements"] == []
    app.engine.revive()
    await _until(lambda: len(app.engine.residency) == 2)
    assert (await _version(app, "pinned"))["placements"] == PINNED
    assert (await _version(app, "loaded"))["placements"] == HOST
    assert (await _version(app, "neither"))["placements"] == []
    await _do(app, "pin", {"pinned": False}, name="pinned")
    await app.admin("DELETE", "/adapters/loaded")
    app.engine.die()
    app.engine.revive()
    await _until(lambda: app.services.placing._is_complete and app.services.placing._epoch == app.engine.info.epoch)  # type: ignore[union-attr]
    assert app.engine.residency == {}


async def test_a_restarted_gateway_wants_what_it_wanted(store_url: str, tmp_path: Path) -> None:
    async with served(store_url, tmp_path) as app:
        await _register(app)
        await _do(app, "pin")
    async with served(store_url, tmp_path) as app:
        await _until(lambda: bool(app.engine.residency))
        assert (await _version(app))["placements"] == PINNED


async def test_one_adapter_that_can_not_be_placed_again_does_not_keep_others_from_it(app: Served) -> None:
    await _register(app, "one", 1)
    await _register(app, "two", 2)
    for name in ("one", "two"):
        await _do(app, "pin", name=name)
    broken = (await _version(app, "one"))["digest"]
    place = app.engine.place

    async def refusing(digest: str, tier: Any, *, pinned: bool | None = None) -> None:
        if digest == broken:
            raise EngineFailed("it broke")
        await place(digest, tier, pinned=pinned)

    app.engine.place = refusing  # type: ignore[method-assign]
    app.engine.die()
    app.engine.revive()
    await _until(lambda: bool(app.engine.residency))
    assert (await _version(app, "two"))["placements"] == PINNED and (await _version(app, "one"))["placements"] == []


async def test_draining_refuses_new_requests_and_lets_those_in_flight_finish(app: Served) -> None:
    key = await app.new_key()
    await _register(app, preload={"tier": "device"})
    async with _in_flight(app, "tiny:tickets", key) as asking:
        assert (await _version(app))["in_flight"] == 1
        drained = (await _do(app, "drain")).json()
        assert (drained["state"], drained["placements"], drained["in_flight"]) == ("draining", DRAINING, 1)
        for model in ("tiny:tickets", "tiny:tickets@1", "tiny:tickets@prod"):
            error_of(await app.call("POST", "/v1/completions", key, json={"model": model, "prompt": "x"}), 503, "draining")
        app.engine.resume()
        assert (await asking).status_code == 200
    await _until(lambda: app.engine.residency == {})
    after = await _version(app)
    assert (after["state"], after["placements"], after["in_flight"]) == ("draining", [], 0)
    for action in ("preload", "pin"):
        error_of(await _do(app, action), 409, "conflict")
    app.engine.behaviour.hang_after = None
    again = await _register(app)
    assert again.status_code == 200 and again.json()["state"] == "ready"
    assert (await app.call("POST", "/v1/completions", key, json={"model": "tiny:tickets", "prompt": "x"})).status_code == 200


async def test_draining_one_version_leaves_another_of_the_same_content_alone(app: Served) -> None:
    key = await app.new_key()
    await _register(app, "one", 1, preload={"tier": "device"})
    await _register(app, "two", 1)
    await _do(app, "drain", name="one")
    assert (await _version(app, "two"))["placements"] == DEVICE
    assert (await app.call("POST", "/v1/completions", key, json={"model": "tiny:two", "prompt": "x"})).status_code == 200
    await app.admin("DELETE", "/adapters/two")
    assert app.engine.residency == {} and len(app.services.contents.digests()) == 1
    await app.admin("DELETE", "/adapters/one")
    assert app.services.contents.digests() == set()


async def test_pins_of_one_content_are_counted_apart(app: Served) -> None:
    await _register(app, "one", 1)
    await _register(app, "two", 1)
    for name in ("one", "two"):
        await _do(app, "pin", name=name)
    await _do(app, "pin", {"pinned": False}, name="one")
    assert (await _version(app, "two"))["placements"] == PINNED
    await _do(app, "pin", {"pinned": False}, name="two")
    assert (await _version(app, "two"))["placements"] == DEVICE


async def test_deleting_lets_requests_in_flight_finish_and_frees_what_they_used(app: Served) -> None:
    key = await app.new_key()
    await _register(app)
    async with _in_flight(app, "tiny:tickets", key) as asking:
        assert (await app.admin("DELETE", "/adapters/tickets")).status_code == 204
        error_of(await app.call("POST", "/v1/completions", key, json={"model": "tiny:tickets", "prompt": "x"}), 404, "model_not_found")
        assert len(app.services.contents.digests()) == 1, "an engine may not have read the bytes yet"
        await asyncio.sleep(0.6)
        assert len(app.services.contents.digests()) == 1
        app.engine.resume()
        assert (await asking).status_code == 200
    await _until(lambda: app.engine.residency == {} and app.services.contents.digests() == set())


async def test_an_adapter_that_a_late_request_loads_after_its_deletion_is_dropped(app: Served) -> None:
    """The request is resolved and in flight, but the engine has not seen it when the version is deleted."""
    await _register(app)
    version = await app.services.registry.get_version("tickets", 1)
    app.services.in_flight.enter(version)
    await app.admin("DELETE", "/adapters/tickets")
    await app.engine.place(version.digest, "device")
    app.services.in_flight.leave(version)
    await _until(lambda: app.engine.residency == {} and app.services.contents.digests() == set())


async def test_deleting_while_it_loads_leaves_nothing_behind(app: Served) -> None:
    await _register(app)
    app.engine.load_s = 0.2
    placing = asyncio.create_task(_do(app, "pin"))
    await _until(lambda: bool(app.engine.residency))
    await app.admin("DELETE", "/adapters/tickets")
    assert (await placing).status_code in (404, 409)
    await _until(lambda: app.engine.residency == {})


async def test_changed_weights_under_an_old_name_are_a_new_version_beside_the_old(app: Served) -> None:
    key = await app.new_key()
    await _register(app, seed=1)
    async with _in_flight(app, "tiny:tickets", key) as asking:
        assert (await _register(app, seed=2)).json()["version"] == 2
        await app.admin("PUT", "/adapters/tickets/aliases/prod", json={"version": 2})
        assert (await app.admin("DELETE", "/adapters/tickets/versions/1")).status_code == 204
        async with _in_flight(app, "tiny:tickets", key) as second:
            old, new = app.engine.requests
            assert old.adapter_digest != new.adapter_digest == (await _version(app, number=2))["digest"]
            app.engine.resume()
            answers = [(await each).headers["x-loramux-model"] for each in (asking, second)]
    assert [answer.split(";")[0] for answer in answers] == ["tiny:tickets@1", "tiny:tickets@2"]
    await _until(lambda: set(app.engine.residency) == {new.adapter_digest})


async def test_a_request_whose_prompt_can_not_be_read_leaves(app: Served) -> None:
    key = await app.new_key()
    await _register(app)
    body = {"model": "tiny:tickets", "prompt": "x" * 5000, "max_tokens": 5}
    error_of(await app.call("POST", "/v1/completions", key, json=body), 400, "context_length_exceeded")
    assert (await _version(app))["in_flight"] == app.services.in_flight.num_requests == 0

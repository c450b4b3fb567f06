"""The service under hostile constraints, killed workers, repeated and concurrent requests."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from loramux.errors import EngineFailed, GrammarTooComplex, InvalidRequest, LoramuxError, StartupFailed, UnsupportedSchema
from loramux.grammar.service import WorkerGrammarService
from loramux.grammar.types import Constraint
from tests.grammar.matching import EOS_TOKEN_IDS, VOCAB_SIZE

OBJECT = Constraint("json_object")


def _schema(schema: Any) -> Constraint:
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _reference_bomb(height: int) -> dict[str, Any]:
    pair = {f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i - 1}"}] * 2, "minItems": 2} for i in range(1, height)}
    return {"$defs": {"a0": {"type": "integer"}, **pair}, "$ref": f"#/$defs/a{height - 1}"}


HOSTILE = {
    "nesting of 10,000": _schema('{"items":' * 10_000 + "{}" + "}" * 10_000),
    "a megabyte": _schema('{"description": "' + "x" * 1_000_000 + '"}'),
    "100,000 enum values": _schema({"enum": list(range(100_000))}),
    "30,000 enum values": _schema({"enum": list(range(30_000))}),
    "multiplied repetitions": Constraint("regex", "(a{1,1000}){1,1000}"),
    "multiplied repetitions in a pattern": _schema({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}),
    "deep parentheses": Constraint("regex", "(" * 4000 + "a" + ")" * 4000),
    "a loop of references": _schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "4,000 optional properties": _schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(4000)}}),
    "deep grammar": Constraint("grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
}


@pytest.mark.parametrize("constraint", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_constraint_is_refused_in_time_and_the_next_one_served(service: WorkerGrammarService, constraint: Constraint) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest):
        service.compile(b"", constraint).result(40)
    assert time.monotonic() - started < 30
    next_one = Constraint("choice", json.dumps([f"after {hash(constraint)}"]))
    assert service.compile(b"", next_one).result(40).num_bytes > 0


def test_a_bomb_of_references_is_no_bomb(service: WorkerGrammarService) -> None:
    assert service.compile(b"", _schema(_reference_bomb(30))).result(40).num_bytes < 10_000_000


@pytest.mark.parametrize(
    ("constraint", "error", "words"),
    [
        (_schema("{"), InvalidRequest, "not valid JSON"),
        (_schema('{"minimum": NaN}'), InvalidRequest, "NaN"),
        (_schema('{"maximum": 1e400}'), InvalidRequest, "1e400"),
        (_schema('{"type": "number", "enum": [-1e999]}'), InvalidRequest, "too large"),
        (Constraint("choice", "[1e400]"), InvalidRequest, "too large"),
        (_schema('{"const": "\\ud800"}'), InvalidRequest, "lone surrogate"),
        (_schema({"not": {}}), UnsupportedSchema, "/not"),
        (_schema(False), UnsupportedSchema, "allows no value"),
        (Constraint("regex", "a(?=b)"), InvalidRequest, "look-around"),
        (Constraint("regex", "a("), InvalidRequest, "parenthesis"),
        (Constraint("choice", "{}"), InvalidRequest, "list of strings"),
        (Constraint("choice", "[]"), InvalidRequest, "list of strings"),
        (Constraint("choice", '["a", 1]'), InvalidRequest, "list of strings"),
        (Constraint("grammar", "root ::= missing"), InvalidRequest, '"missing" is not defined'),
        (Constraint("grammar", ""), InvalidRequest, "root"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cant_be_compiled_is_the_clients_mistake(
    service: WorkerGrammarService, constraint: Constraint, error: type[LoramuxError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        service.compile(b"", constraint).result(40)
    assert type(caught.value) is error
    assert "/project/" not in caught.value.message


def test_refused_keywords_are_listed(service: WorkerGrammarService) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        service.compile(b"", _schema({"type": "array", "uniqueItems": True, "contains": {}})).result(40)
    assert caught.value.details is not None
    listed = {(keyword["pointer"], keyword["keyword"]) for keyword in caught.value.details["keywords"]}
    assert listed == {("/contains", "contains")}


def test_a_worker_killed_in_the_middle_is_replaced(service: WorkerGrammarService) -> None:
    slow = _schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(4500)}})
    service.compile(b"", OBJECT).result(60)
    pid = service._workers[0].pid
    assert pid is not None
    future = service.compile(b"kill", slow)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GrammarTooComplex):
        future.result(40)
    assert service.compile(b"after", Constraint("choice", '["next"]')).result(60).num_bytes > 0
    assert service._workers[0].pid != pid


def test_a_worker_killed_while_idle_is_replaced(service: WorkerGrammarService) -> None:
    service.compile(b"", OBJECT).result(60)
    pid = service._workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert service.compile(b"idle", Constraint("choice", '["idle"]')).result(60).num_bytes > 0


def test_equal_constraints_share_a_job_and_salts_do_not(service: WorkerGrammarService) -> None:
    constraint = Constraint("choice", '["shared"]')
    futures = []
    threads = [threading.Thread(target=lambda: futures.append(service.compile(b"one", constraint))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait(futures, 60)
    assert len({id(future.result()) for future in futures}) == 1
    assert service.compile(b"one", constraint).result() is futures[0].result()
    assert service.compile(b"two", constraint).result(60) is not futures[0].result()


def test_a_refusal_is_remembered(service: WorkerGrammarService) -> None:
    constraint = Constraint("regex", "a(?=remembered)")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="look-around") as caught:
            service.compile(b"salt", constraint).result(40)
        assert type(caught.value) is InvalidRequest
    future = service.compile(b"salt", constraint)
    assert future.done()
    assert not service.compile(b"another salt", constraint).done()


def test_refusals_are_bounded(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.grammar.service.MAX_REFUSALS", 3)
    service = WorkerGrammarService(tokenizer_json, VOCAB_SIZE, EOS_TOKEN_IDS)
    try:
        futures = [service.compile(b"", Constraint("regex", "(" * (number + 1))) for number in range(6)]
        wait(futures, 60)
        assert len(service._refusals) == 3
        assert service.compile(b"", Constraint("regex", "((((((")).done()
        assert not service.compile(b"", Constraint("regex", "(")).done()
    finally:
        service.close()


def test_the_cache_keeps_to_its_bound(tokenizer_json: Path) -> None:
    service = WorkerGrammarService(tokenizer_json, VOCAB_SIZE, EOS_TOKEN_IDS, cache_bytes=3000)
    try:
        first = service.compile(b"", Constraint("choice", '["c0"]')).result(60)
        assert 500 < first.num_bytes < 1500
        assert service.compile(b"", Constraint("choice", '["c0"]')).result(60) is first
        for number in range(1, 6):
            service.compile(b"", Constraint("choice", f'["c{number}"]')).result(60)
            service.check_integrity()
        assert service.compile(b"", Constraint("choice", '["c0"]')).result(60) is not first
        assert service.compile(b"", OBJECT).result(60) is not service.compile(b"", OBJECT).result(60)
    finally:
        service.close()


def test_wall_time_is_bounded(tokenizer_json: Path) -> None:
    service = WorkerGrammarService(tokenizer_json, VOCAB_SIZE, EOS_TOKEN_IDS, wall_s=0.3, cpu_s=60)
    try:
        service.compile(b"", Constraint("choice", '["warm"]')).result(60)
        with pytest.raises(GrammarTooComplex):
            service.compile(b"", _schema({"type": "object", "properties": {f"p{i}": True for i in range(4500)}})).result(30)
    finally:
        service.close()


def test_closing_leaves_no_process_and_no_thread(tokenizer_json: Path) -> None:
    threads_before = set(threading.enumerate())
    service = WorkerGrammarService(tokenizer_json, VOCAB_SIZE, EOS_TOKEN_IDS, num_workers=2)
    service.compile(b"", OBJECT).result(60)
    pids = [worker.pid for worker in service._workers]
    pending = service.compile(b"", HOSTILE["4,000 optional properties"])
    service.close()
    service.close()
    with pytest.raises(LoramuxError):
        pending.result(5)
    with pytest.raises(EngineFailed):
        service.compile(b"", OBJECT).result(5)
    assert set(threading.enumerate()) == threads_before
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("eos_token_ids", [(), (VOCAB_SIZE,), (-1,)])
def test_end_of_sequence_ids_are_checked_at_start(tokenizer_json: Path, eos_token_ids: tuple[int, ...]) -> None:
    with pytest.raises(StartupFailed, match="end-of-sequence"):
        WorkerGrammarService(tokenizer_json, VOCAB_SIZE, eos_token_ids)

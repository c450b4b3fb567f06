"""Compiles constraints, each once, and keeps what was compiled under a byte bound. A constraint is first tried in a killable process;
only what compiled there within the limits, and walks at a bounded cost, is compiled here, in a thread that gives way to the engine's.
This second compilation has no limit of its own: it is the first one over again, same text, same library, same tables."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgspec

from loramux.errors import EngineFailed, Failure, InvalidRequest, LoramuxError
from loramux.grammar.job_queue import JobQueue
from loramux.grammar.limits import check_text
from loramux.grammar.types import CompiledGrammar, Constraint
from loramux.grammar.vocabulary import read_vocabulary
from loramux.grammar.worker_process import WorkerProcess
from loramux.grammar.worker_protocol import Setup
from loramux.grammar.xgrammar_backend import Compiler

_Key = tuple[bytes, bytes, str]
_GIB = 1024**3
NICENESS = 10
MAX_REFUSALS = 256
MAX_REFUSAL_BYTES = 16 * 1024
REFUSAL_S = 60.0
"""For which a refusal is remembered. Not for ever: one for the time it took may be due to what else the machine did."""


class _Refusal(NamedTuple):
    failure: Failure
    until: float


class _Job:
    def __init__(self, key: _Key, constraint: Constraint) -> None:
        self.key = key
        self.constraint = constraint
        self.future: Future[CompiledGrammar] = Future()
        self.future.set_running_or_notify_cancel()


class WorkerGrammarService:
    """Implements `GrammarService`. Thread-safe. Starts its workers at once, in the background, and a new one wherever one is killed.

    `vocab_size` is the width of the logits. A job may take `wall_s` seconds, `cpu_s` of them on a CPU, and `memory_gib` of address
    space beyond what its worker has when idle; past that the worker is killed and the job fails with `GrammarTooComplex`.
    Raises `StartupFailed` for a tokenizer whose tokens can't be read as bytes.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        num_workers: int = 1,
        wall_s: float = 10.0,
        cpu_s: float = 2.0,
        memory_gib: float = 1.0,
        cache_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        vocabulary = read_vocabulary(tokenizer_json, vocab_size, eos_token_ids)
        self._tokenizer_digest = vocabulary.digest
        self._compiler = Compiler(vocabulary)
        self._wall_s = wall_s
        self._cache_bytes = cache_bytes
        self._setup = Setup(str(tokenizer_json), vocab_size, eos_token_ids, cpu_s, int(memory_gib * _GIB))
        self._lock = threading.Lock()
        self._closed = False
        self._cache: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._num_cached_bytes = 0
        self._pending: dict[_Key, _Job] = {}
        self._refusals: OrderedDict[_Key, _Refusal] = OrderedDict()
        self._queue: JobQueue[_Job] = JobQueue()
        self._workers = [WorkerProcess(self._setup) for _ in range(num_workers)]
        self._threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def compile(self, salt: bytes, constraint: Constraint) -> Future[CompiledGrammar]:
        """See `GrammarService.compile`. Never blocks; equal constraints under one salt share a job, and the salts take turns."""
        try:
            check_text(constraint.text)
        except LoramuxError as error:
            return _failed(error)
        key = (salt, _digest(constraint), self._tokenizer_digest)
        with self._lock:
            if self._closed:
                return _failed(EngineFailed("the grammar service is closed"))
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
                return _done(cached)
            refusal = self._refusals.get(key)
            if refusal is not None and time.monotonic() < refusal.until:
                return _failed(LoramuxError.from_failure(refusal.failure))
            job = self._pending.get(key)
            if job is None:
                job = self._pending[key] = _Job(key, constraint)
                self._queue.push(salt, job)
            return job.future

    def close(self) -> None:
        """Kills the workers and waits for the threads; jobs not done fail with `EngineFailed`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            abandoned = list(self._pending.values())
            self._pending.clear()
        for worker in self._workers:
            worker.close()
        self._queue.close()
        for thread in self._threads:
            thread.join()
        for job in abandoned:
            if not job.future.done():
                job.future.set_exception(EngineFailed("the grammar service is closed"))

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the cache and its account disagree."""
        with self._lock:
            assert self._num_cached_bytes == sum(grammar.num_bytes for grammar in self._cache.values())
            assert self._num_cached_bytes <= self._cache_bytes

    def _serve(self, worker: WorkerProcess) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        with contextlib.suppress(OSError):
            worker.start()
        while (job := self._queue.pop()) is not None:
            if not self._closed:
                self._do(worker, job)
        worker.discard()

    def _do(self, worker: WorkerProcess, job: _Job) -> None:
        try:
            grammar = self._compiler.compile(worker.vet(job.constraint, self._wall_s))
        except Exception as error:
            self._finish(job, None, error)
        else:
            self._finish(job, grammar, None)

    def _finish(self, job: _Job, grammar: CompiledGrammar | None, error: Exception | None) -> None:
        with self._lock:
            if self._pending.pop(job.key, None) is None:
                return
            if grammar is not None:
                self._keep(job.key, grammar)
            elif isinstance(error, InvalidRequest):
                self._remember(job.key, error.to_failure())
        if grammar is not None:
            job.future.set_result(grammar)
        elif isinstance(error, LoramuxError):
            job.future.set_exception(error)
        else:
            job.future.set_exception(EngineFailed(f"compiling a grammar failed: {error!r}"))

    def _remember(self, key: _Key, failure: Failure) -> None:
        if len(msgspec.msgpack.encode(failure)) > MAX_REFUSAL_BYTES:
            return
        self._refusals[key] = _Refusal(failure, time.monotonic() + REFUSAL_S)
        self._refusals.move_to_end(key)
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _keep(self, key: _Key, grammar: CompiledGrammar) -> None:
        if grammar.num_bytes > self._cache_bytes:
            return
        self._cache[key] = grammar
        self._num_cached_bytes += grammar.num_bytes
        while self._num_cached_bytes > self._cache_bytes:
            _, evicted = self._cache.popitem(last=False)
            self._num_cached_bytes -= evicted.num_bytes


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(f"{constraint.kind}\0{constraint.text}".encode("utf-8", "surrogatepass")).digest()


def _done(grammar: CompiledGrammar) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    future.set_result(grammar)
    return future


def _failed(error: LoramuxError) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    future.set_exception(error)
    return future

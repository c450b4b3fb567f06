"""A compile worker: `python -m loramux.grammar.worker`, killable at any time. Client text is parsed here and nowhere else.

It reads jobs from standard input and ends with it, so it can't outlive whoever started it by more than one job's CPU time.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import traceback
from pathlib import Path
from typing import IO

# tvm_ffi, which xgrammar is bound with, imports torch where it can: seconds and hundreds of megabytes, for tensors that a compiler
# never sees.
sys.modules["torch"] = None  # type: ignore[assignment]

from loramux.errors import GrammarTooComplex, InvalidRequest, LoramuxError  # noqa: E402
from loramux.grammar.constraints import to_grammar  # noqa: E402
from loramux.grammar.types import Constraint  # noqa: E402
from loramux.grammar.vetting import OF_CLIENT_GRAMMARS, OF_LOWERED, check_cost  # noqa: E402
from loramux.grammar.vocabulary import Vocabulary, read_vocabulary  # noqa: E402
from loramux.grammar.worker_protocol import (  # noqa: E402
    Compile,
    Ready,
    Refused,
    Setup,
    Vetted,
    decode_to_worker,
    read_frame,
    write_frame,
)
from loramux.grammar.xgrammar_backend import Compiler  # noqa: E402

NICENESS = 10
MAX_GRAMMAR_BYTES = 64 * 1024 * 1024
STACK_BYTES = 4 * 1024 * 1024
"""Half of what the engine's threads have, so that what a worker survives the engine does."""


def main() -> None:
    os.nice(NICENESS)
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()


def _serve() -> None:
    jobs, replies = sys.stdin.buffer, _own_stdout()
    setup = _read(jobs)
    if not isinstance(setup, Setup):
        return
    try:
        vocabulary = read_vocabulary(Path(setup.tokenizer_json), setup.vocab_size, setup.eos_token_ids)
        compiler = Compiler(vocabulary)
    except LoramuxError as error:
        write_frame(replies, Refused(error.to_failure()))
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _address_space_bytes() + setup.memory_bytes)
    write_frame(replies, Ready())
    while isinstance(job := _read(jobs), Compile):
        spent = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(spent.ru_utime + spent.ru_stime + setup.cpu_s))
        write_frame(replies, _answer(compiler, vocabulary, job.constraint))


def _own_stdout() -> IO[bytes]:
    """The pipe that standard output was, with whatever libraries print sent to standard error instead."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _read(jobs: IO[bytes]) -> Setup | Compile | None:
    frame = read_frame(jobs)
    return None if frame is None else decode_to_worker(frame)


def _limit(which: int, value: int) -> None:
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _answer(compiler: Compiler, vocabulary: Vocabulary, constraint: Constraint) -> Vetted | Refused:
    try:
        grammar = to_grammar(constraint)
        compiled = compiler.compile(grammar)
        if compiled.num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarTooComplex(f"the compiled grammar is larger than {MAX_GRAMMAR_BYTES} bytes")
        check_cost(compiled, vocabulary, OF_CLIENT_GRAMMARS if constraint.kind == "grammar" else OF_LOWERED)
        return Vetted(grammar)
    except LoramuxError as error:
        return Refused(error.to_failure())
    except (MemoryError, RecursionError):
        return Refused(GrammarTooComplex("compiling the constraint needs too much memory").to_failure())
    except Exception:  # a fault of ours, met by one client's text: it must not take the worker from the others
        traceback.print_exc()
        return Refused(InvalidRequest("the constraint can't be compiled").to_failure())


if __name__ == "__main__":
    main()

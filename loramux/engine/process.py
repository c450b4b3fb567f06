"""The engine process: `python -m loramux.engine.process`, an `EngineConfig` as JSON on standard input.

Exit codes: 0 told to stop, 1 failed to start (the last line of the log has the event `startup_failed` and says why) or to go on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from loramux.adapters.contents import ContentStore
from loramux.engine.adapter_fetch import AdapterFetch
from loramux.engine.config import EngineConfig
from loramux.engine.json_log import log_to_stderr
from loramux.engine.server import Core, EngineServer, Wake, bind
from loramux.errors import StartupFailed

log = logging.getLogger("loramux.engine.process")

BuildCore = Callable[[EngineConfig, Callable[[str], tuple[bytes, bytes]], Callable[[], None]], Core]
"""(config, fetch of an adapter by digest for loader threads, wake) to the core; raises `StartupFailed`."""

_PR_SET_PDEATHSIG = 1


def main(build: BuildCore) -> int:
    """Run the engine that `build` makes, until it is told to stop. -> the exit code"""
    log_to_stderr()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides when its engines stop
    try:
        return _serve(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig), build)
    except StartupFailed as error:
        log.critical(error.message, extra={"fields": {"event": "startup_failed"}})
    except Exception as error:
        log.critical(f"the engine could not start: {type(error).__name__}", exc_info=True, extra={"fields": {"event": "startup_failed"}})
    return 1


def _serve(config: EngineConfig, build: BuildCore) -> int:
    wake = Wake()
    fetch = AdapterFetch(ContentStore(Path(config.data_dir) / "adapters"), wake)
    with zmq.Context() as context, _bind(context, config.endpoint) as socket:
        core = build(config, fetch.fetch, wake)
        try:
            server = EngineServer(socket, core, fetch, wake)
            signal.signal(signal.SIGTERM, lambda *_: server.stop())
            log.info("the engine is ready", extra={"fields": _summary(core)})
            return server.run()
        finally:
            fetch.close()
            core.close()


def _bind(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    try:
        return bind(context, endpoint)
    except zmq.ZMQError as error:
        raise StartupFailed(f"the engine can't bind {endpoint}: {os.strerror(error.errno or 0)}") from error


def _summary(core: Core) -> dict[str, object]:
    info = core.info
    return {
        "model": info.base.name,
        "device": info.device,
        "kernels": info.kernels,
        "dtype": info.base.dtype,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "max_model_len": info.base.max_model_len,
    }


def _die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    from loramux.engine.build import build_core

    sys.exit(main(build_core))

"""`loramux demo`: the demo model with its three adapters, registered through the admin API, and a request to paste."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

import loramux
from loramux.errors import StartupFailed
from loramux.gateway.cli.demo_model import fetch_demo_model
from loramux.gateway.cli.serve import run_server
from loramux.gateway.settings import Settings, UsageError, default_data_dir, load_settings

HOST = "127.0.0.1"
SERVED_NAME = "smollm2-135m"
TENANT = "demo"


def run_demo(port: int, data_dir: Path | None, examples: Path | None) -> int:
    """Serve the demo until told to stop; the exit code. What goes wrong is one line on standard error.

    The demo has a store of its own, `demo/` in the data directory, whatever the environment says.
    """
    root = _absolute(data_dir)
    try:
        found = find_examples(examples)
        settings = demo_settings(fetch_demo_model(root), port, root / "demo", found)
    except StartupFailed as error:
        return _failed(error, 1)
    except UsageError as error:
        return _failed(error, 2)
    admin_key = os.environ.setdefault("LORAMUX_ADMIN_KEY", secrets.token_hex(32))
    url = f"http://{HOST}:{port}"
    logging.getLogger("httpx").setLevel(logging.WARNING)
    visit = Visit(DemoSetup(url, admin_key, found, settings.data_dir / "key"), url)
    visit.start()
    return run_server(settings) or visit.exit_code


def run_fetch(data_dir: Path | None) -> int:
    """Only fetch the demo model, and print its directory; the exit code."""
    try:
        print(fetch_demo_model(_absolute(data_dir)).parent)
    except StartupFailed as error:
        return _failed(error, 1)
    return 0


def demo_settings(model: Path, port: int, data_dir: Path, examples: Examples) -> Settings:
    """Raises UsageError if the environment sets something that can't be."""
    flags = {
        "model": str(model),
        "served_model_name": SERVED_NAME,
        "host": HOST,
        "port": port,
        "store_url": "embedded",
        "data_dir": data_dir,
        "adapter_root": [examples.path / "adapters"],
    }
    return load_settings(flags)


def _absolute(data_dir: Path | None) -> Path:
    return (data_dir or default_data_dir()).expanduser().absolute()


def _failed(error: Exception, exit_code: int) -> int:
    print(f"loramux: {' '.join(str(error).split())}", file=sys.stderr)
    return exit_code


class Examples(NamedTuple):
    """The directory `examples/` of a clone."""

    path: Path

    @property
    def adapters(self) -> list[Path]:
        return sorted(config.parent for config in self.path.glob("adapters/*/adapter_config.json"))

    def request(self) -> dict[str, Any]:
        """The body of the request to try."""
        body: dict[str, Any] = json.loads((self.path / "request.json").read_text())
        return body


def find_examples(path: Path | None) -> Examples:
    """`path`, or `examples/` beside the package, where a clone has it. Raises StartupFailed if there are no demo adapters."""
    found = Examples((path or Path(loramux.__file__).parents[1] / "examples").resolve())
    if not found.adapters or not (found.path / "request.json").is_file():
        raise StartupFailed(
            f"No demo adapters in {found.path}; run from a clone of loramux, or pass its examples directory with --examples."
        )
    return found


class Visit(threading.Thread):
    """Sets the demo up once the server in the main thread is ready, and prints how to use it; stops the server if that fails."""

    def __init__(self, setup: DemoSetup, url: str) -> None:
        super().__init__(name="demo-setup", daemon=True)
        self._setup = setup
        self._url = url
        self.exit_code = 0

    def run(self) -> None:
        try:
            key = self._setup.run()
        except (StartupFailed, httpx.HTTPError, OSError) as error:
            self.exit_code = _failed(error, 1)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            print(invitation(self._url, key, self._setup.examples), flush=True)


class DemoSetup:
    """Fills a running server over its HTTP interface: tenant, adapters, key. Every step may be repeated on a server that has them."""

    def __init__(self, url: str, admin_key: str, examples: Examples, key_file: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0)
        self._admin_key = admin_key
        self.examples = examples
        self._key_file = key_file

    def run(self) -> str:
        """Returns the demo tenant's key. Raises StartupFailed on any answer that is not a success."""
        self._wait_until_ready()
        self._admin("POST", "/tenants", {"id": TENANT}, exists_is_fine=True)
        for adapter in self.examples.adapters:
            self._register(adapter)
        return self._kept_key() or self._new_key()

    def _wait_until_ready(self) -> None:
        """As long as it takes: a server that can't start ends the process."""
        while True:
            try:
                if self._http.get("/health/ready").is_success:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.25)

    def _register(self, adapter: Path) -> None:
        """Also when an earlier start registered other content: a bare name means what is in the directory now."""
        body = {"base": SERVED_NAME, "source": {"uri": adapter.as_uri()}, "tenants": [TENANT]}
        version = self._admin("POST", f"/adapters/{adapter.name}/versions", body)["version"]
        self._admin("PUT", f"/adapters/{adapter.name}/aliases/prod", {"version": version})

    def _kept_key(self) -> str | None:
        """The key of an earlier start, if the server still takes it."""
        if not self._key_file.is_file():
            return None
        key = self._key_file.read_text().strip()
        known = self._http.get("/v1/models", headers=bearer(key)).is_success
        return key if known else None

    def _new_key(self) -> str:
        key: str = self._admin("POST", f"/tenants/{TENANT}/keys", {"scopes": ["infer"]})["key"]
        self._key_file.unlink(missing_ok=True)
        with os.fdopen(os.open(self._key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
        return key

    def _admin(self, method: str, path: str, body: dict[str, Any], *, exists_is_fine: bool = False) -> Any:
        response = self._http.request(method, f"/admin/v1{path}", json=body, headers=bearer(self._admin_key))
        if response.is_success or (exists_is_fine and response.status_code == httpx.codes.CONFLICT):
            return response.json()
        raise StartupFailed(f"{method} {path} was answered {response.status_code}: {response.text}")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def invitation(url: str, key: str, examples: Examples) -> str:
    """What the demo prints once it can be used."""
    body = json.dumps(examples.request(), indent=2).replace("'", "'\\''")
    names = ", ".join(f"{SERVED_NAME}:{adapter.name}" for adapter in examples.adapters)
    return f"""
Ready. Models: {SERVED_NAME}, {names}
Paste this into another terminal:

KEY={key}
curl -s {url}/v1/chat/completions -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' -d '{body}'

Ctrl-C stops the server.
"""

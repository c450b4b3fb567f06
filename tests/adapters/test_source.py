from __future__ import annotations

import os
from pathlib import Path

import pytest

from loramux.adapters.contents import AdapterFiles, Contents
from loramux.adapters.source import LocalSource
from loramux.errors import AdapterInvalid, InvalidRequest
from tests.adapters.samples import config_bytes, tensor_bytes

CONTENTS = Contents(config_bytes(), tensor_bytes())
FILES = AdapterFiles(CONTENTS)


def write(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_bytes(CONTENTS.config)
    (directory / "adapter_model.safetensors").write_bytes(CONTENTS.tensors)
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_a_directory_under_a_root(root: Path, tmp_path: Path) -> None:
    directory = write(root / "with blank" / "tickets")
    source = LocalSource([tmp_path / "other", root])
    for uri in (str(directory), f"file:{directory}", f"file://{directory}", directory.as_uri(), f"file://localhost{directory}"):
        assert source.read(uri) == FILES


def test_links_within_the_roots_are_followed(root: Path) -> None:
    write(root / "tickets")
    (root / "link").symlink_to(root / "tickets")
    assert LocalSource([root]).read(f"file:{root}/link") == FILES


def test_a_root_that_is_a_link(root: Path, tmp_path: Path) -> None:
    write(root / "tickets")
    (tmp_path / "alias").symlink_to(root)
    assert LocalSource([tmp_path / "alias"]).read(f"{tmp_path}/alias/tickets") == FILES


def test_outside_is_the_same_whether_anything_is_there(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside")
    write(tmp_path / "root-too")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "dangling").symlink_to(tmp_path / "nothing")
    (root / "loop").symlink_to(root / "loop")
    inside = root / "half"
    write(inside)
    (inside / "adapter_config.json").unlink()
    (inside / "adapter_config.json").symlink_to(tmp_path / "outside" / "adapter_config.json")
    outside = [
        tmp_path / "outside",
        tmp_path / "nothing",
        root / ".." / "outside",
        root / "link",
        root / "dangling",
        tmp_path / "root-too",
        inside,
    ]
    messages = set()
    for path in outside:
        with pytest.raises(InvalidRequest) as raised:
            LocalSource([root]).read(f"file:{path}")
        messages.add(raised.value.message)
    assert len(messages) == 1
    assert str(tmp_path) not in messages.pop()


@pytest.mark.parametrize(
    "uri", ["https://example.org/a", "hf:org/a", "s3://a/b", "relative/path", "file:relative", "file://host/a", "", "/a\0b"]
)
def test_other_kinds_of_source(root: Path, uri: str) -> None:
    with pytest.raises(InvalidRequest):
        LocalSource([root]).read(uri)


def test_no_roots_is_no_sources(root: Path) -> None:
    with pytest.raises(InvalidRequest):
        LocalSource([]).read(str(write(root / "a")))


def test_a_loop_of_links(root: Path) -> None:
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises((InvalidRequest, AdapterInvalid)):
        LocalSource([root]).read(f"{root}/loop")


def test_what_is_not_an_adapter(root: Path) -> None:
    source = LocalSource([root], max_bytes=1 << 20)
    (root / "empty").mkdir()
    with pytest.raises(AdapterInvalid, match=r"adapter_config\.json is missing"):
        source.read(f"{root}/empty")
    with pytest.raises(AdapterInvalid, match="not a directory"):
        source.read(f"{root}/nothing")
    pickled = write(root / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.bin is a pickle"):
        source.read(str(pickled))
    pipe = write(root / "pipe")
    (pipe / "adapter_model.safetensors").unlink()
    os.mkfifo(pipe / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalid, match="not a file"):
        source.read(str(pipe))
    large = write(root / "large")
    (large / "adapter_model.safetensors").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(AdapterInvalid, match="more than"):
        source.read(str(large))


def test_a_pickle_beside_safetensors_is_not_read(root: Path) -> None:
    directory = write(root / "both")
    (directory / "optimizer.pt").write_bytes(b"\x80\x04")
    assert LocalSource([root]).read(str(directory)) == FILES


def test_added_tokens_are_read_where_they_are(root: Path) -> None:
    directory = write(root / "tokens")
    (directory / "added_tokens.json").write_bytes(b"{}")
    assert LocalSource([root]).read(str(directory)) == AdapterFiles(CONTENTS, b"{}")

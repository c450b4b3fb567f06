from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loramux.adapters.contents import Contents, ContentStore
from loramux.adapters.identity import content_digest
from loramux.errors import AdapterInvalid, NotFound
from tests.adapters.samples import config_bytes, tensor_bytes

CONTENTS = Contents(config_bytes(), tensor_bytes())
DIGEST = content_digest(*CONTENTS)


def test_what_is_put_can_be_got(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    assert not store.has(DIGEST)
    store.put(DIGEST, *CONTENTS)
    assert store.has(DIGEST) and store.verify(DIGEST) and store.get(DIGEST) == CONTENTS
    assert ContentStore(tmp_path).digests() == {DIGEST}
    store.delete(DIGEST)
    store.delete(DIGEST)
    assert not store.has(DIGEST) and store.digests() == set()
    with pytest.raises(NotFound):
        store.get(DIGEST)


def test_bytes_of_another_digest_are_refused(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    with pytest.raises(AdapterInvalid):
        store.put(DIGEST, config_bytes(lora_alpha=1), tensor_bytes())
    assert store.digests() == set()


@pytest.mark.parametrize("digest", ["", "sha256:", "sha256:../../etc", "sha256:" + "A" * 64, "md5:" + "a" * 64, DIGEST + "\n"])
def test_only_digests_name_an_entry(tmp_path: Path, digest: str) -> None:
    store = ContentStore(tmp_path)
    assert not store.has(digest)
    with pytest.raises(NotFound):
        store.get(digest)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: str) -> None:
    store = ContentStore(tmp_path)
    store.put(DIGEST, *CONTENTS)
    (file,) = tmp_path.glob("sha256/*/adapter_model.safetensors")
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(CONTENTS.tensors[:-1] + (b"" if damage == "truncate" else bytes([CONTENTS.tensors[-1] ^ 1])))
    with pytest.raises(NotFound):
        store.get(DIGEST)
    assert not store.verify(DIGEST)
    store.put(DIGEST, *CONTENTS)
    assert store.get(DIGEST) == CONTENTS


def test_leftovers_of_a_crash_are_removed_once_old(tmp_path: Path) -> None:
    ContentStore(tmp_path)
    for name, age_s in (("old", 7200), ("new", 0)):
        leftover = tmp_path / "unfinished" / name
        leftover.mkdir()
        (leftover / "adapter_config.json").write_bytes(b"{")
        os.utime(leftover, (time.time() - age_s,) * 2)
    assert ContentStore(tmp_path).digests() == set()
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["new"]


def test_many_writers_of_one_digest(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: store.put(DIGEST, *CONTENTS), range(32)))
    assert store.get(DIGEST) == CONTENTS
    assert not list((tmp_path / "unfinished").iterdir())


WRITER = """
import sys
from pathlib import Path
from loramux.adapters.contents import ContentStore
from loramux.adapters.identity import content_digest
from tests.adapters.samples import config_bytes, tensor_bytes
store = ContentStore(Path(sys.argv[1]))
contents = config_bytes(), tensor_bytes()
digest = content_digest(*contents)
print("ready", flush=True)
while True:
    store.put(digest, *contents)
    store.delete(digest)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02])
def test_a_killed_writer_leaves_the_entry_whole_or_absent(tmp_path: Path, delay_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = ContentStore(tmp_path)
    if store.has(DIGEST):
        assert store.get(DIGEST) == CONTENTS
    store.put(DIGEST, *CONTENTS)
    assert store.get(DIGEST) == CONTENTS

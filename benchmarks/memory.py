"""Memory of a server and its child processes."""

from __future__ import annotations

from pathlib import Path

COMPILE_WORKER = "loramux.grammar.worker"
"""What a compile worker runs."""


def resident_bytes(pid: int) -> int:
    """Of the process and all its descendants: the proportional set size, in which shared pages count once."""
    return sum(_pss_bytes(each) for each in (pid, *_descendants(pid)))


def resident_by_process(pid: int) -> dict[str, int]:
    """`resident_bytes` by the module or program that each process runs; those that run the same are added up."""
    found: dict[str, int] = {}
    for each in (pid, *_descendants(pid)):
        name = _program(each)
        found[name] = found.get(name, 0) + _pss_bytes(each)
    return found


def _program(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "-m" in words:
        return words[words.index("-m") + 1]
    return Path(words[0].split()[0]).name if words[0] else ""  # a server may have put a sentence there


def _descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*children, *(each for child in children for each in _descendants(child))]


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0

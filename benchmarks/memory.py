"""Memory of a server and its child processes."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Of the process and all its descendants: the proportional set size, in which shared pages count once."""
    return sum(_pss_bytes(each) for each in (pid, *_descendants(pid)))


def _descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*children, *(each for child in children for each in _descendants(child))]


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0

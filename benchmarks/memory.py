"""Memory of a server and its child processes."""

from __future__ import annotations

from pathlib import Path

COMPILE_WORKER = "loramux.grammar.worker"


def resident_bytes(pid: int, *, without: str | None = None) -> int:
    """Of the process and all its descendants: the proportional set size, in which shared pages count once.

    Processes with `without` in their command line are left out, and so is their share of pages that they share.
    """
    return sum(_pss_bytes(each) for each in (pid, *_descendants(pid)) if without is None or without not in command_line(each))


def resident_by_process(pid: int) -> dict[str, int]:
    """Bytes by what each process runs; those that run the same are added up."""
    found: dict[str, int] = {}
    for each in (pid, *_descendants(pid)):
        name = _name(command_line(each))
        found[name] = found.get(name, 0) + _pss_bytes(each)
    return found


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _name(command: str) -> str:
    words = command.split()
    return words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name if words else ""


def _descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*children, *(each for child in children for each in _descendants(child))]


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0

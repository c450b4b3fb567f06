"""EBNF of the numbers within bounds, written without an exponent: every decimal that is in the range, none that is not."""

from __future__ import annotations

from decimal import Decimal
from itertools import groupby
from typing import NamedTuple

from loramux.grammar.ebnf import any_of

MAX_DIGITS = 128
"""Of a bound, before and after the point together."""


class Bound(NamedTuple):
    value: Decimal
    exclusive: bool


def as_decimal(number: int | float) -> Decimal:
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def num_digits(value: Decimal) -> int:
    return len(f"{value:f}")


def _digit_class(low: str, high: str) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"


def _same_length(low: str, high: str) -> str:
    """The digit strings from `low` to `high`, both of one length."""
    rest = len(low) - 1
    if not low:
        return '""'
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f'"{low[0]}"' + (f" {_same_length(low[1:], high[1:])}" if rest else "")
    first, last = int(low[0]), int(high[0])
    choices = []
    if rest and set(low[1:]) != {"0"}:
        choices.append(f'"{first}" {_same_length(low[1:], "9" * rest)}')
        first += 1
    if rest and set(high[1:]) != {"9"}:
        choices.append(f'"{last}" {_same_length("0" * rest, high[1:])}')
        last -= 1
    if first <= last:
        choices.append(_digit_class(str(first), str(last)) + (f" [0-9]{{{rest}}}" if rest else ""))
    return any_of(choices)


def _naturals(low: int, high: int | None) -> str:
    """Integers from `low` >= 0 up to `high`; None is without end."""
    choices = []
    last_length = len(str(low if high is None else high))
    for length in range(len(str(low)), last_length + 1):
        start = max(low, 10 ** (length - 1) if length > 1 else 0)
        end = 10**length - 1 if high is None else min(high, 10**length - 1)
        choices.append(_same_length(str(start), str(end)))
    if high is None:
        choices.append(f"[1-9] [0-9]{{{last_length},}}")
    return any_of(choices)


def integer_range(low: int | None, high: int | None) -> str:
    """Integers in [low, high], which is not empty; None is unbounded."""
    if low is None and high is None:
        return "integer"
    choices = []
    if high is None or high >= 0:
        choices.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        smallest = 1 if high is None or high >= 0 else -high
        choices.append(f'"-" {_naturals(smallest, None if low is None else -low)}')
    return any_of(choices)


class _Digits(NamedTuple):
    """What is left of the bounds while fraction digits are written: `low` and `high` are the bound's digits yet to be met, None once
    the written digits have left the bound behind."""

    low: str | None
    high: str | None
    low_exclusive: bool
    high_exclusive: bool

    def may_end(self) -> bool:
        above = self.low is None or (self.low == "" and not self.low_exclusive)
        return above and (self.high is None or self.high != "" or not self.high_exclusive)

    def after(self, digit: str) -> _Digits | None:
        low, high = self.low, self.high
        if low is not None:
            edge = low[:1] or "0"
            if digit < edge:
                return None
            low = low[1:] if digit == edge else None
        if high is not None:
            edge = high[:1] or "0"
            if digit > edge:
                return None
            high = high[1:] if digit == edge else None
        if low == "" and not self.low_exclusive:
            low = None
        return self._replace(low=low, high=high)

    def some(self) -> str | None:
        """At least one more digit, or None where no digit can follow."""
        if self.low is None and self.high is None:
            return "[0-9]+"
        if self.low == "" and self.high is None:
            return '"0"* [1-9] [0-9]*'
        if self.high == "":
            return None if self.high_exclusive or self.low is not None else '"0"+'
        choices = []
        for state, digits in groupby("0123456789", self.after):
            written = list(digits)
            tail = state and state._tail()
            if tail is not None:
                choices.append(_digit_class(written[0], written[-1]) + tail)
        return any_of(choices) if choices else None

    def _tail(self) -> str | None:
        if self.low is None and self.high is None:
            return " [0-9]*"
        some = self.some()
        if self.may_end():
            return "" if some is None else f" ({some})?"
        return None if some is None else f" {some}"

    def fraction(self) -> str | None:
        some = self.some()
        if self.may_end():
            return "" if some is None else f' ("." {some})?'
        return None if some is None else f' "." {some}'


def _parts(value: Decimal) -> tuple[int, str]:
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _magnitudes(low: Bound, high: Bound | None) -> list[str]:
    """Decimals without a sign from `low` >= 0 to `high`."""
    low_whole, low_fraction = _parts(low.value)
    low_digits: str | None = low_fraction if low_fraction or low.exclusive else None
    if high is None:
        at_low = _Digits(low_digits, None, low.exclusive, False).fraction()
        return [f'"{low_whole}"{at_low}', f'{_naturals(low_whole + 1, None)} ("." [0-9]+)?']
    high_whole, high_fraction = _parts(high.value)
    if low_whole == high_whole:
        between = _Digits(low_digits, high_fraction, low.exclusive, high.exclusive).fraction()
        return [] if between is None else [f'"{low_whole}"{between}']
    edges = [
        (low_whole, _Digits(low_digits, None, low.exclusive, False).fraction()),
        (high_whole, _Digits(None, high_fraction, False, high.exclusive).fraction()),
    ]
    choices = [f'"{whole}"{fraction}' for whole, fraction in edges if fraction is not None]
    if low_whole + 1 <= high_whole - 1:
        choices.append(f'{_naturals(low_whole + 1, high_whole - 1)} ("." [0-9]+)?')
    return choices


def number_range(low: Bound | None, high: Bound | None) -> str | None:
    """Decimals within the bounds, None if there are none. `number` where there are no bounds."""
    if low is None and high is None:
        return "number"
    zero = Decimal(0)
    choices: list[str] = []
    if high is None or high.value > zero or (high.value == zero and not high.exclusive):
        choices += _magnitudes(low if low is not None and low.value >= zero else Bound(zero, False), high)
    if low is None or low.value < zero:
        nearest = Bound(-high.value, high.exclusive) if high is not None and high.value < zero else Bound(zero, True)
        choices += [f'"-" {text}' for text in _magnitudes(nearest, None if low is None else Bound(-low.value, low.exclusive))]
    return any_of(choices) if choices else None


def multiples_in_range(step: int, low: int, high: int) -> list[int]:
    return list(range(-(-low // step) * step, high + 1, step))

"""Strings of bounded length, as rules that xgrammar matches at a bounded cost per token.

Counted the plain way, `char{0,100}`, each token of several characters crosses ends of rules, where xgrammar knows only while matching
what may follow: it tries most of the vocabulary again for each token, for 50 ms. Here the last `NUM_LAST` characters are a chain of
rules that each end in the next one, which crosses no ends. Before them, a character is a rule with a lookahead: what may follow it
as far as most tokens reach. xgrammar trusts a lookahead, and has each token's answer when the grammar is compiled, where the rule is
referenced once in all, and not at the end of another rule: by `counted` alone.
A length's rules are shared with other lengths, and are not more than a few hundred.
"""

from __future__ import annotations

from loramux.grammar.ebnf import EVERY_CHARACTER, PLAIN_CHARACTER, RuleTable, literal
from loramux.grammar.regex import Chars
from loramux.grammar.regex_form import to_regex

NUM_LAST = 16
"""Characters. Tokens of more are looked at while matching: 120 of 49k, 1 ms. With 12 it is 900 and 8 ms; each adds 10 ms of compiling."""
BASE = 16
"""Of the rules for an exact number of characters."""
STEP = BASE**2
"""Base of an upper bound: one rule for each character of its last digit, then one for each 256, and so on."""


class StringLengths:
    """Makes the rules that one grammar needs, in its table."""

    def __init__(self, rules: RuleTable) -> None:
        self._rules = rules

    def body(self, minimum: int, maximum: int | None) -> str:
        """EBNF of a string from its opening quote, of `minimum` to `maximum` characters as `char` of `JSON_RULES` counts them."""
        if maximum is None:
            return " ".join([r'"\""', *self._exactly(minimum), "string_rest"])
        num_counted = max(0, maximum - NUM_LAST)
        num_required = min(minimum, num_counted)
        if num_required == num_counted:
            rest = self._last(maximum - num_counted, minimum - num_required)
        else:
            rest = self._at_most(num_counted - num_required, self._last(NUM_LAST, 0), "at_most")
        return " ".join([r'"\""', *self._exactly(num_required), rest])

    def _last(self, most: int, least: int) -> str:
        """`least` to `most` characters, at most `NUM_LAST`, and the closing quote."""
        name = f"last_{most}_{least}"
        if name in self._rules:
            return name
        choices = [] if least else [r'"\""']
        if most:
            following = self._last(most - 1, max(0, least - 1))
            choices += [f"{PLAIN_CHARACTER} {following}", rf'"\\" escape {following}']
        return self._rules.define(name, " | ".join(choices))

    def _at_most(self, num_counted: int, last: str, stem: str) -> str:
        """At most so many characters and what `last` has, and the closing quote. No rule ends before the quote: each end is a cost."""
        name, num_so_far, power = last, 0, 0
        while num_counted:
            num_counted, digit = divmod(num_counted, STEP)
            block = " ".join(self._exactly(STEP**power))
            fewer = r'"\""' if power == 0 or not digit else self._at_most(STEP**power - 1, self._last(0, 0), "below")
            for _ in range(digit):
                num_so_far += STEP**power
                following, name = name, f"{stem}_{num_so_far}"
                if name not in self._rules:
                    self._rules.define(name, f"{fewer} | {block} {following}")
            power += 1
        return name

    def _exactly(self, num_counted: int) -> list[str]:
        """Rules that have so many characters together."""
        names: list[str] = []
        power = 0
        while num_counted:
            num_counted, digit = divmod(num_counted, BASE)
            names += [self._power(power)] * digit
            power += 1
        return names[::-1]

    def _power(self, power: int) -> str:
        """`BASE ** power` characters."""
        if power == 0:
            return self._counted()
        name = f"characters_{power}"
        if name not in self._rules:
            self._rules.define(name, " ".join([self._power(power - 1)] * BASE))
        return name

    def _counted(self) -> str:
        """One character that `NUM_LAST` more may follow, at least."""
        if "counted" not in self._rules:
            self._rules.define("ahead_0", '""')
            for number in range(1, NUM_LAST + 1):
                self._rules.define(f"ahead_{number}", rf'"\"" | char ahead_{number - 1}')
            character = literal(to_regex(Chars(EVERY_CHARACTER), in_json=True))
            self._rules.define("character", f"Regex({character}) (= ahead_{NUM_LAST})")
            self._rules.define("nothing", '""')
            self._rules.define("counted", "character nothing")
        return "counted"

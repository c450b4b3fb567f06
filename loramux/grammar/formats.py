"""The string formats that are enforced, each as a regular expression for the whole string, in the dialect of `regex.py`."""

from __future__ import annotations

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_YEAR = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_OFFSET = r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?{_OFFSET}"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_CALENDAR = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d{2}|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """RFC 3986, IPv6address: at most one run of zeros left out."""
    full = [rf"(?:{_H16}:){{6}}{_LS32}", rf"::(?:{_H16}:){{5}}{_LS32}"]
    for before in range(1, 8):
        after = 5 - before
        head = rf"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?"
        tail = rf"(?:{_H16}:){{{after}}}{_LS32}" if after >= 0 else _H16 if after == -1 else ""
        full.append(rf"{head}::{tail}")
    return "(?:" + "|".join(full) + ")"


_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'

_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_USER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})"
_REG_NAME = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_AUTHORITY = rf"(?:{_USER}*@)?(?:\[{_ipv6()}\]|{_REG_NAME}*)(?::\d*)?"
_HIERARCHY = rf"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*|)"
_QUERY = rf"(?:{_PCHAR}|[/?])*"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:\d+W|{_CALENDAR}(?:{_CLOCK})?|{_CLOCK})",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "email": rf"(?:{_ATEXT}(?:\.{_ATEXT})*|{_QUOTED})@{_LABEL}(?:\.{_LABEL})*",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_HIERARCHY}(?:\?{_QUERY})?(?:#{_QUERY})?",
}
"""RFC 3339 without leap seconds, Gregorian dates from year 1 (as Python and ISO 8601), RFC 4122, RFC 3986, RFC 5321 mailboxes."""

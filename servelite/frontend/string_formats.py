"""What the values of `format` ask of strings: those of JSON Schema, pydantic, OpenAPI and zod.

Where validators differ, only what all of them accept is written: no second 60, no year 0, no lower case in
`date-time`, no hostname whose label is like an A-label, no `::` in the place of a single group.
"""

from __future__ import annotations

from typing import Final

_LEAP: Final = "0[48]|[2468][048]|[13579][26]"
_DATE: Final = (
    "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}(?:{_LEAP})|(?:{_LEAP})00)-02-29"
)
_OF_24: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_OF_24}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_OF_24})"
_HOURS: Final = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS: Final = "[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D"
_LABEL: Final = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM: Final = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL: Final = rf"{_ATOM}{{1,64}}|{_ATOM}{{1,15}}(?:\.{_ATOM}{{1,15}}){{1,3}}"  # 64 characters at the most
_BYTE: Final = "(?:25[0-5]|(?:2[0-4]|1[0-9]|[1-9])?[0-9])"
_IPV4: Final = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX: Final = "[0-9a-fA-F]"
_GROUP: Final = f"{_HEX}{{1,4}}"
_IPV6: Final = f"(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{6}}:|::|:(?::{_GROUP}){{1,6}}" + "".join(
    f"|(?:{_GROUP}:){{1,{left}}}(?::{_GROUP}){{1,{6 - left}}}|(?:{_GROUP}:){{{left}}}:"
    for left in range(1, 6)
)
_IPV4_OF: Final = f"(?:{_IPV4})(?:/(?:[12]?[0-9]|3[0-2]))?"
_IPV6_OF: Final = f"(?:{_IPV6})(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?"
_IN_NAME: Final = rf"[a-zA-Z0-9._~!$&'()*+,;=-]|%{_HEX}{{2}}"
_IN_PATH: Final = f"(?:{_IN_NAME}|[:@])"
_PATH: Final = f"{_IN_PATH}+(?:/{_IN_PATH}*)*"
_URI: Final = (
    rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://(?:(?:{_IN_NAME}|:)*@)?(?:\[(?:{_IPV6})\]|(?:{_IN_NAME})*)(?::[0-9]*)?"
    rf"(?:/{_IN_PATH}*)*|/(?:{_PATH})?|(?:{_PATH})?)(?:\?(?:{_IN_PATH}|[/?])*)?(?:\#(?:{_IN_PATH}|[/?])*)?"
)


def _uuid(version: str) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


def _base64(others: str) -> str:
    """Padded; the bits that no byte has are 0."""
    one = f"[A-Za-z0-9{others}]"
    return f"(?:{one}{{4}})*(?:{one}{{2}}[AEIMQUYcgkosw048]=|{one}[AQgw]==)?"


FORMATS: Final[dict[str, str]] = {
    "date-time": f"(?:{_DATE})T{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P(?:(?:{_DAYS})(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"(?:{_LOCAL})@{_LABEL}(?:\.{_LABEL}){{0,4}}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv4interface": _IPV4_OF,
    "ipv6": _IPV6,
    "ipv6interface": _IPV6_OF,
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    "ipvanyinterface": f"{_IPV4_OF}|{_IPV6_OF}",
    "uri": _URI,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    **{f"uuid{version}": _uuid(version) for version in "1345678"},
    "base64": _base64("+/"),
    "base64url": _base64(r"\-_"),
    "byte": _base64("+/"),
    **dict.fromkeys(("binary", "password", "path", "file-path", "directory-path"), ""),
}
"""By name, the expression for all of a string; "": it is accepted, and asks nothing of the text."""

_MOST: Final = 2**53 - 1
NUMBERS: Final[dict[str, tuple[int, int] | None]] = {
    **{f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32)},
    **dict.fromkeys(("int64", "int"), (-_MOST, _MOST)),
    **dict.fromkeys(("uint64", "uint"), (0, _MOST)),
    **dict.fromkeys(("float", "double"), None),
}
"""OpenAPI's and schemars's, of numbers: the least and the largest; None: all. What is beyond a double is not
written."""

BY_PATTERN: Final = (
    *("cidrv4", "cidrv6", "credit_card", "cuid", "cuid2", "e164", "emoji", "ends_with", "hex", "includes"),
    *("ksuid", "lowercase", "mac", "nanoid", "starts_with", "ulid", "uppercase", "xid"),
)
"""zod's: each is written beside the `pattern` that says what it is."""

MAX_LENGTHS: Final = {"hostname": 253}
"""In characters, where an expression does not say it."""

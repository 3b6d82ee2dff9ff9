# SPDX-License-Identifier: Apache-2.0
"""The names of deep_ep_bench.py's cases. Needs no torch."""

from __future__ import annotations

import re
from typing import NamedTuple

FP8_BLOCK = 128  # elements of a scale
NORMAL_SMS = 24  # where a case of the normal mode names none
FORMS = "elastic-TOKENS[-expand[-exact]][-fp8][-SMSsms], ll-TOKENS[-fp8] and normal-TOKENS[-fp8][-SMSsms]"

STANDARD = [
    *(f"elastic-{tokens}{form}" for tokens in (128, 64, 8, 1) for form in ("", "-expand")),
    "elastic-128-fp8",
    "elastic-128-expand-fp8",
    "elastic-128-expand-exact",
    "elastic-4096-expand-exact-24sms",
    *(f"elastic-4096{form}-{sms}sms" for form in ("", "-expand", "-fp8", "-expand-fp8") for sms in (24, 64)),
    *(f"ll-{tokens}{form}" for tokens in (128, 8, 1) for form in ("", "-fp8")),
    *(f"normal-4096{form}-{NORMAL_SMS}sms" for form in ("", "-fp8")),
]


class Shape(NamedTuple):
    hidden: int
    experts: int
    topk: int


class Case(NamedTuple):
    name: str
    kind: str  # elastic, ll or normal
    tokens: int  # of a rank
    by_expert: bool
    is_exact: bool  # allow_multiple_reduction=False
    fp8: bool
    sms: int  # 0: the library's choice

    @staticmethod
    def of(name: str) -> Case | None:
        """None if no case has this name."""
        match = re.fullmatch(
            r"(elastic|ll|normal)-([1-9]\d{0,5})(-expand)?(-exact)?(-fp8)?(?:-([1-9]\d{0,2})sms)?", name
        )
        if match is None:
            return None
        kind, tokens, expand, exact, fp8, sms = match.groups()
        fits = (expand is None or kind == "elastic") and (sms is None or kind != "ll") and (exact is None or expand)
        has = [part is not None for part in (expand, exact, fp8)]
        return Case(name, kind, int(tokens), *has, int(sms or 0)) if fits else None

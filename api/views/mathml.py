"""Formulas as MathML, which browsers typeset without a library.

Reads the text that `remat.passes.formula_text.to_text` writes, whose grammar is::

    sum     = ["-"] product { ("+" | "-") product }
    product = power { ("·" | "*" | "/") power }
    power   = atom [ "**" ["-"] atom ]
    atom    = number | name | name "(" sum { ", " sum } ")" | "(" sum ")"

Numbers may have commas between groups of three digits. MathML Core (https://www.w3.org/TR/mathml-core/)
has no line breaks: members of a long `Max` stand in rows. Text outside the grammar is shown as it is.
"""

import re
from html import escape

_TOKEN = re.compile(r"\s*(\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:\.\d+)?|[^\W\d][\w.]*|\*\*|[-+·*/(),])")
_BRACKETS = {"floor": ("⌊", "⌋"), "ceiling": ("⌈", "⌉"), "Abs": ("|", "|")}
_LONG = 60
"""Characters from which the members of a `Max` stand in rows."""


def to_mathml(text: str) -> str:
    """The formula as a `<math>` element; text that is no formula becomes its content.

    Args:
        text: such as ``4,096 + Max(8·batch, floor(seq/2))``.
    """
    try:
        body = _Reader(text).whole()
    except ValueError:
        body = f"<mtext>{escape(text)}</mtext>"
    return f'<math display="block">{body}</math>'


class _Reader:
    """A recursive descent over the tokens, one method a rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0

    def whole(self) -> str:
        body = self.sum()
        if self.next():
            raise ValueError(f"{self.next()!r} follows the formula")
        return body

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        """The next token, if it is one of those; else the empty string, and nothing is read."""
        token = self.next()
        if token not in wanted:
            return ""
        self.at += 1
        return token

    def sum(self) -> str:
        parts = ["<mo>−</mo>"] if self.take("-") else []  # noqa: RUF001  # a minus sign
        parts.append(self.product())
        while sign := self.take("+", "-"):
            parts.append("<mo>+</mo>" if sign == "+" else "<mo>−</mo>")  # noqa: RUF001
            parts.append(self.product())
        return _row(parts)

    def product(self) -> str:
        above, below = [self.power()], list[str]()
        while sign := self.take("·", "*", "/"):
            (below if sign == "/" else above).append(self.power())
        numerator = _times(above)
        return f"<mfrac>{numerator}{_times(below)}</mfrac>" if below else numerator

    def power(self) -> str:
        base = self.atom()
        if not self.take("**"):
            return base
        minus = "<mo>−</mo>" if self.take("-") else ""  # noqa: RUF001
        return f"<msup>{base}{_row([minus, self.atom()] if minus else [self.atom()])}</msup>"

    def atom(self) -> str:
        start, token = self.at, self.next()
        self.at += 1
        if token == "(":
            inner = self.sum()
            self.close()
            return f"<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>"
        if token[:1].isdigit():
            return f"<mn>{token}</mn>"
        if not re.match(r"[^\W\d]", token):
            raise ValueError(f"{token!r} begins no number, name or bracket")
        if not self.take("("):
            return f"<mi>{escape(token)}</mi>"
        members = [self.sum()]
        while self.take(","):
            members.append(self.sum())
        self.close()
        return _function(token, members, sum(map(len, self.tokens[start : self.at])))

    def close(self) -> None:
        if not self.take(")"):
            raise ValueError("a bracket is not closed")


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at:]!r} is no part of a formula")
        found.append(match[1])
        at = match.end()
    return found


def _row(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"


def _times(factors: list[str]) -> str:
    return factors[0] if len(factors) == 1 else f"<mrow>{'<mo>·</mo>'.join(factors)}</mrow>"


def _function(name: str, members: list[str], length: int) -> str:
    """A function of its members.

    Args:
        name: such as ``Max``.
        members: MathML of each.
        length: characters of the whole, which say whether it has to be broken.
    """
    if name in _BRACKETS and len(members) == 1:
        left, right = _BRACKETS[name]
        return f"<mrow><mo>{left}</mo>{members[0]}<mo>{right}</mo></mrow>"
    head = f"<mi>{escape(name.lower() if name in ('Max', 'Min') else name)}</mi>"
    if length > _LONG and len(members) > 1:
        rows = "".join(f"<mtr><mtd>{member}</mtd></mtr>" for member in members)
        return f"<mrow>{head}<mo>{{</mo><mtable>{rows}</mtable><mo>}}</mo></mrow>"
    inner = "<mo>,</mo>".join(members)
    return f"<mrow>{head}<mo>(</mo>{inner}<mo>)</mo></mrow>"

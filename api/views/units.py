"""Times and places as people read them; bytes are `budget.in_units`'."""


def in_seconds(nanoseconds: int) -> str:
    """A time, such as ``1.25 ms``; a dash if it is not known."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.2f} {unit}"
    return f"{nanoseconds} ns" if nanoseconds else "-"


def shortened(text: str, width: int) -> str:
    """The text, cut in the middle if it is longer than `width`: the ends of a path say the most."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}" if width > 1 else text[:width]

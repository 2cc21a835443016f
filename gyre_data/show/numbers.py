"""Numbers and times for people. What is not known is "-", never a zero."""

from __future__ import annotations

__all__ = [
    "DASH",
    "amount",
    "count",
    "dollars",
    "duration",
    "file_size",
    "latency",
    "plural",
    "power",
    "ratio",
    "share",
]

DASH = "-"


def count(value: int | None) -> str:
    """1347 -> 1,347."""
    return DASH if value is None else f"{value:,}"


def counted(value: int, what: str) -> str:
    """1 call, 1,347 calls."""
    return f"{value:,} {what}" if value == 1 else f"{value:,} {what}s"


def amount(value: int | None) -> str:
    """Three figures at most: 940, 6.8k, 121k, 1.4M, 38M."""
    if value is None:
        return DASH
    size, unit = float(value), ""
    for unit in ("", "k", "M", "G"):
        if abs(size) < 999.5 or unit == "G":
            break
        size /= 1000
    return f"{size:.1f}{unit}" if unit and abs(size) < 9.95 else f"{size:.0f}{unit}"


def dollars(value: float | None) -> str:
    """$14, $3.21, $0.0042: two figures at least."""
    if value is None:
        return DASH
    if value >= 9.995:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.0995 or value == 0 else f"${value:.2g}"


def ratio(value: float | None) -> str:
    """1.274 -> 1.27x."""
    return DASH if value is None else f"{value:.2f}x"


def share(part: int, whole: int) -> str:
    """Part of a whole in per cent; something is never shown as 0 %."""
    if not whole:
        return DASH
    percent = 100 * part / whole
    return "<1%" if 0 < percent < 1 else f"{percent:.0f}%"


def duration(seconds: float | None) -> str:
    """12 s, 3m12, 1h31."""
    if seconds is None:
        return DASH
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}"


def file_size(num_bytes: int | None) -> str:
    """940 B, 6.8 KiB, 121 MiB, 4.2 TiB."""
    if num_bytes is None:
        return DASH
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}" if unit != "B" and abs(size) < 9.95 else f"{size:,.0f} {unit}"


def latency(seconds: float | None) -> str:
    """0.04 s, 0.5 s, then as `duration`."""
    if seconds is None or seconds >= 9.95:
        return duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 0.095 or not seconds else f"{seconds:.2f} s"


def plural(value: int, noun: str) -> str:
    """1 call, 1,347 calls."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def power(value: float) -> str:
    """1.9e17: two figures of a number too large to name."""
    return f"{value:.1e}".replace("e+", "e")

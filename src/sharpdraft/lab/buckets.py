"""Context buckets: 0-512, 512-1K, 1K-2K and so on, doubling without an end, so that every context
falls into exactly one."""

from __future__ import annotations

_FIRST = 512


def bucket_of(context: int) -> int:
    """Number of the bucket of a context of so many tokens; its upper end belongs to it."""
    return (max(context - 1, 0) // _FIRST).bit_length()


def bounds(bucket: int) -> tuple[int, int]:
    """A bucket holds the contexts above the first number, up to the second."""
    return (_FIRST << bucket - 1 if bucket else 0), _FIRST << bucket


def label(bucket: int) -> str:
    """A bucket as people write it, such as 1K-2K."""
    low, high = bounds(bucket)
    return f"{_short(low)}-{_short(high)}"


def _short(tokens: int) -> str:
    return str(tokens) if tokens < 1024 else f"{tokens // 1024}K"

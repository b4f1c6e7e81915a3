"""Settings of PyTorch's CUDA caching allocator, and the string that users set them by.

Sources: ``c10/core/AllocatorConfig.h`` (constants), ``c10/core/AllocatorConfig.cpp`` and
``c10/cuda/CUDAAllocatorConfig.h`` (keys and their values) of PyTorch 2.13; the parsed values were
compared with what libc10 of that version answers. https://pytorch.org/docs/stable/notes/cuda.html
describes the keys.

Not handled: ``backend:cudaMallocAsync``, another allocator altogether.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

_MIB = 2**20
_INTERVALS = 16
UNLIMITED = 2**63 - 1
"""Bytes; stands for "no limit"."""


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Constants and settings; the defaults are PyTorch's."""

    min_block_size: int = 512
    """Bytes; blocks are multiples of it (``kMinBlockSize``)."""
    small_size: int = _MIB
    """Bytes; a block up to this size comes from the small pool, and a rest of a large block up to
    this size is not split off (``kSmallSize``)."""
    small_buffer: int = 2 * _MIB
    """Bytes of a segment, or of an expandable page, of the small pool (``kSmallBuffer``)."""
    large_segment_size: int = 20 * _MIB
    """Bytes of a segment for a block below `min_large_alloc`, and of an expandable page of the large
    pool (``large_segment_size_mb``; ``kLargeBuffer`` before 2.11)."""
    min_large_alloc: int = 10 * _MIB
    """Bytes; a block from this size on gets a segment of its own size (``kMinLargeAlloc``)."""
    round_large: int = 2 * _MIB
    """Bytes; segments of such blocks are multiples of it (``kRoundLarge``)."""
    max_split_size: int = UNLIMITED
    """Bytes; blocks from this size on are never split, and kept for requests as large
    (``max_split_size_mb``)."""
    max_non_split_rounding: int = 20 * _MIB
    """Bytes by which such a block must not reach beyond the request that it serves
    (``max_non_split_rounding_mb``; `from_env` lets it follow ``large_segment_size_mb``)."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    """For sizes in [2^i, 2^(i+1)) MiB, i = 0 to 15 (the first also for smaller sizes, the last also
    for larger): into how many equal steps the interval between two powers of 2 is cut, sizes being
    rounded up to a step; 0 and 1: no such rounding."""
    expandable_segments: bool = False
    """Whether a pool grows page by page in one range of addresses."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed memory beyond which unused whole segments are given back before a new
    one is asked for; 0: never. Without a `memory_fraction` below 1 it does nothing, as in PyTorch."""
    memory_fraction: float = 1.0
    """Fraction of the device that the allocator may reserve (``per_process_memory_fraction``, 2.10 and
    later, or ``torch.cuda.set_per_process_memory_fraction``)."""
    device_memory: int | None = None
    """Bytes that the driver can give to the allocator: the device's memory less the CUDA context and
    what others hold; None: no end. Not PyTorch's."""

    @property
    def allowed_memory(self) -> int | None:
        """Bytes that the allocator lets itself reserve; None without a fraction below 1."""
        if self.device_memory is None or self.memory_fraction >= 1:
            return None
        return int(self.memory_fraction * self.device_memory)

    @classmethod
    def from_env(cls, settings: str, device_memory: int | None = None) -> Self:
        """The settings in the form of ``PYTORCH_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF``.

        Args:
            settings: for instance ``"expandable_segments:True,max_split_size_mb:512"``.
            device_memory: see the field of that name.

        Raises:
            ValueError: if a key is unknown, or has a value that PyTorch refuses.
        """
        fields: dict[str, object] = {"device_memory": device_memory}
        compact = re.sub(r"\s", "", settings)
        for part in re.split(r",(?![^\[]*\])", compact) if compact else ():
            key, colon, value = part.partition(":")
            if key in _IGNORED and colon:
                continue
            if key not in _PARSERS or not colon:
                known = ", ".join([*_PARSERS, *_IGNORED])
                raise ValueError(
                    f"no allocator setting in {part!r}; there are, as key:value: {known}"
                )
            name, parse = _PARSERS[key]
            try:
                fields[name] = parse(value)
            except ValueError as error:
                raise ValueError(f"allocator setting {part!r}: {error}") from error
        fields.pop("backend", None)
        if "large_segment_size" in fields:
            fields.setdefault("max_non_split_rounding", fields["large_segment_size"])
        config = cls(**fields)  # type: ignore[arg-type]
        config._check_order()
        return config

    def _check_order(self) -> None:
        """Refuse what PyTorch refuses about sizes that depend on each other."""
        if self.large_segment_size <= self.min_large_alloc:
            raise ValueError(f"large_segment_size_mb must exceed {self.min_large_alloc // _MIB}")
        sizes = {
            "max_split_size_mb": self.max_split_size,
            "max_non_split_rounding_mb": self.max_non_split_rounding,
        }
        for key, size in sizes.items():
            if size < self.large_segment_size:
                raise ValueError(f"{key} must be at least {self.large_segment_size // _MIB}")


def _mebibytes(value: str) -> int:
    return int(value) * _MIB


def _boolean(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("must be True or False")
    return value == "True"


def _threshold(value: str) -> float:
    if not 0 < float(value) < 1:
        raise ValueError("must lie between 0 and 1")
    return float(value)


def _fraction(value: str) -> float:
    if not 0 <= float(value) <= 1:
        raise ValueError("must lie between 0 and 1")
    return float(value)


def _backend(value: str) -> str:
    if value != "native":
        raise ValueError("only the native backend is simulated")
    return value


def _power(value: str, least: int) -> int:
    number = int(value)
    if number < least or number & (number - 1):
        raise ValueError(f"{number} is not a power of 2")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """Divisions of all intervals: ``4``, or by lower end in MiB, ``[256:1,512:2,>:8]``.

    The first entry counts for all smaller sizes too, and ``>`` for all larger than the last one;
    intervals between two entries keep 0, as in PyTorch.
    """
    if not value.startswith("["):
        return (_power(value, 1),) * _INTERVALS
    if not value.endswith("]"):
        raise ValueError("a ']' is missing")
    divisions = [0] * _INTERVALS
    last = 0
    for position, entry in enumerate(value[1:-1].split(",")):
        start, _, count = entry.partition(":")
        number = _power(count, 0)
        if start == ">":
            divisions[last + 1 :] = [number] * (_INTERVALS - last - 1)
            continue
        last = min(_power(start, 1).bit_length() - 1, _INTERVALS - 1)
        if position == 0:
            divisions[:last] = [number] * last
        divisions[last] = number
    return tuple(divisions)


_PARSERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _boolean),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
    "backend": ("backend", _backend),
}
_IGNORED = (  # they concern pinned host memory, CUDA graphs, or when an error is raised
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)

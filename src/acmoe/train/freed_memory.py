"""Let a command keep the memory that it frees, instead of handing it back to the system.

glibc gives the end of its heap back to Linux as soon as a few MiB of it are free, and takes every
tensor of more than 32 MiB from Linux alone. A model on a CPU frees and allocates that much in each
step, and Linux then clears every page anew: 430 page faults in one forward pass of nano, which took
1.6 ms instead of 1.0, and 8,300 in forward and backward of 16 tokens of 32 experts of 256 x 512,
which took 29 ms instead of 15 (both by scripts). Where the heap happens to end differs between
processes, so that some of nano's were slow and others not.

Blocks of up to 128 MiB leave gaps in the heap: `acmoe bench layer` of olmoe with 256 tokens has a
peak of 6.3 GB instead of 5.1, and with a threshold of 1 GiB 6.9 to 7.9.

The library itself never changes the allocator; only commands call `keep_freed_memory`.
"""

import ctypes
import os

KEPT = 256 * 2**20  # bytes at the end of the heap that are not handed back
# Bytes up to which memory comes from the heap, and the most that older versions of glibc take.
_IN_HEAP, _IN_OLD_HEAP = 128 * 2**20, 32 * 2**20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt's options in malloc.h
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep up to KEPT bytes of freed memory; return True if it does from now on.

    Other allocators stay as they are, and so does glibc's where its own variables are set. Both
    options are set: one alone turns off glibc's own adjustment of the other.
    """
    if not _is_glibc() or any(name in os.environ for name in _CHOSEN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(_TRIM_THRESHOLD, KEPT):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _IN_HEAP) or mallopt(_MMAP_THRESHOLD, _IN_OLD_HEAP))


def _is_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    return name in getattr(os, "confstr_names", ()) and bool(os.confstr(name))

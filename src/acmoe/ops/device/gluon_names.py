"""One name for each Gluon function whose name differs between versions of Triton.

With these names Triton 3.6 and 3.7 compile every Gluon kernel of this library, and 3.9 all but
attention's forward, because it cannot reinterpret shared memory between a padded and a plain layout
(attention/hopper/staging.py). hopper.py decides which versions may run them.
"""

from types import ModuleType
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first_attr(module: ModuleType, *names: str) -> Any:
    """Return the first of these attributes that the module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


# The newer name comes first: the older one may still exist as a function that raises.
load_tile = _first_attr(tma, "async_load", "async_copy_global_to_shared")
store_tile = _first_attr(tma, "async_store", "async_copy_shared_to_global")
# cp.async, which copies 4 to 16 bytes per thread
load_rows = _first_attr(async_copy, "async_load", "async_copy_global_to_shared")
thread_barrier = _first_attr(gl, "barrier", "thread_barrier")

_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Return a view of the same shared memory with another dtype, shape and layout."""
    if _HAS_REINTERPRET:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)

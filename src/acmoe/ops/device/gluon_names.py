"""Functions of Gluon that go by another name in another version of Triton.

With these names 3.6 and 3.7 compile every kernel in Gluon, 3.9 all but attention's forward: it sees
no memory as both padded and not (attention_strip.py). What may run is in hopper.py.
"""

from types import ModuleType
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _named(module: ModuleType, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


# The newer name first: the older one may be left as a function that raises.
load_tile = _named(tma, "async_load", "async_copy_global_to_shared")
store_tile = _named(tma, "async_store", "async_copy_shared_to_global")
load_rows = _named(async_copy, "async_load", "async_copy_global_to_shared")  # 4 to 16 bytes each
thread_barrier = _named(gl, "barrier", "thread_barrier")

_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def seen_as(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory, as numbers of another type in another layout."""
    if _PUBLIC:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)

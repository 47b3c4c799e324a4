"""Launch Triton kernels with little work on the host.

`kernel[grid](...)` binds and specialises every argument anew in each launch: 17 to 56 us a launch
on two ARM cores, where the call into the driver takes a few. `launch` does that once for each kind
of call and keeps the compiled kernel; the next call of the same kind goes straight to its launcher.

Two calls are of one kind if everything that Triton may specialise a kernel for is equal: the
kernel, the device, the values of whole numbers, the dtype of each tensor and whether its address is
a multiple of 16 bytes, the block of each TMA descriptor, and all keyword arguments. Where a launch
is not known to be an ordinary one (an interpreted kernel, another version of Triton, a profiler's
hook) it goes through Triton.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

MOST_KINDS = 4096  # kinds of calls that are kept; beyond that all are dropped

# The launch at the end of Triton's `JITFunction.run`, from version 3.3 on.
_LAUNCH = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, "
    "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, "
    "*bound_args.values())"
)


class Compiled(NamedTuple):
    """A compiled kernel, and the values of its compile-time parameters, which come last."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    owners: tuple[Any, Any]  # Triton's kernel and the compiled one, which must stay alive


_kinds: dict[tuple[Any, ...], Compiled] = {}


class Launch(NamedTuple):
    """One launch as it was made, for `recording.py`."""

    compiled: Compiled
    grid: tuple[int, int, int]
    args: tuple[Any, ...]  # as `Memory.traced` returned them


class Computation(NamedTuple):
    """One result of torch as it was computed by `compute`, for `recording.py`."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    result: Any


class Recorder(threading.local):
    """Records the launches of this thread while `steps` is a list; None: no recording."""

    steps: list[Launch | Computation | None] | None = None  # None: a step that cannot be repeated
    # The `Memory` that says what to keep of an argument. Tensors are not kept, so that their memory
    # is freed as usual.
    memory: Any = None
    computing = False  # True inside `compute`, whose operators are recorded as one step

    def add(self, compiled: Compiled | None, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Record a launch; compiled: None if it cannot be repeated."""
        assert self.steps is not None
        full = (*grid, 1, 1)[:3]
        step = (
            None
            if compiled is None
            else Launch(compiled, full, tuple(map(self.memory.traced, args)))
        )
        self.steps.append(step)


recorder = Recorder()


def compute(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return function(*tensors), a tensor in new memory. A tape repeats the call as one step."""
    if recorder.steps is None:
        return function(*tensors)
    args = tuple(map(recorder.memory.operand, tensors))
    recorder.computing = True
    try:
        found = function(*tensors)
    finally:
        recorder.computing = False
    recorder.steps.append(Computation(function, args, recorder.memory.operand(found)))
    return found


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch as `kernel[grid](*args, **options)` does.

    args: the kernel's first parameters, in order; options: its compile-time parameters, which all
    follow them, and Triton's launch options.
    """
    ordinary = isinstance(kernel, triton.JITFunction) and not kernel.pre_run_hooks
    if ordinary and recorder.steps is None and plain_launches():
        _launch_known(kernel, grid, args, options)
        return
    compiled = kernel[grid](*args, **options)
    if recorder.steps is not None:
        found = _compiled(kernel, compiled, len(args), options) if ordinary else None
        recorder.add(found, grid, args)


def _launch_known(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Launch the compiled kernel that is kept for this kind of call.

    If none is kept, launch by Triton and keep the compiled kernel.
    """
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    kinds = [
        (one.dtype, one.data_ptr() & 15 == 0) if isinstance(one, Tensor) else _kind(one)
        for one in args
    ]
    key = (id(kernel), device, *kinds, *options, *options.values())
    try:
        found = _kinds.get(key)
    except TypeError:  # an argument without a hash
        kernel[grid](*args, **options)
        return
    if found is None:
        compiled = kernel[grid](*args, **options)
        found = _compiled(kernel, compiled, len(args), options)
        if found is not None:
            if len(_kinds) >= MOST_KINDS:
                _kinds.clear()
            _kinds[key] = found
        return
    run, function, metadata, constants, _ = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.get_current_stream(device)
    run(x, y, z, stream, function, metadata, None, None, None, *args, *constants)


def _kind(value: Any) -> Any:
    """Return all that Triton may specialise a kernel for in an argument that is no tensor."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return float  # a value that the compiler never sees
    # A TMA descriptor; one of Gluon has a layout.
    extra = getattr(value, "padding", None), getattr(value, "layout", None)
    return value.base.dtype, tuple(value.block_shape), *extra


def _compiled(
    kernel: Any, compiled: Any, num_args: int, options: dict[str, Any]
) -> Compiled | None:
    """Return what a direct launch needs, from the result of `kernel[grid](...)`.

    None: the kernel must be launched through Triton.
    """
    names = kernel.arg_names[num_args:]
    if compiled is None or not _known_triton() or any(name not in options for name in names):
        return None
    constants = tuple(options[name] for name in names)
    handles = compiled.run, compiled.function, compiled.packed_metadata
    return Compiled(*handles, constants, (kernel, compiled))


@contextlib.contextmanager
def count_launches() -> Iterator[list[object] | None]:
    """Yield a list that gets an entry for each launch of this thread through Triton.

    It yields None under a version of Triton that does not report launches.
    """
    chain = triton.knobs.runtime.launch_enter_hook
    if not hasattr(chain, "add"):  # an older version of Triton
        yield None
        return
    seen: list[object] = []
    own = threading.get_ident()

    def note(metadata: object) -> None:
        if threading.get_ident() == own:
            seen.append(metadata)

    chain.add(note)
    try:
        yield seen
    finally:
        chain.remove(note)


def plain_launches() -> bool:
    """Return True if launches may bypass Triton's front end: it has no hooks and no debug mode."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    watched = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or runtime.debug
    return not watched and _known_triton()


@functools.cache
def _known_triton() -> bool:
    """Return True if this version of Triton launches a compiled kernel as `launch` does."""
    try:
        source = inspect.getsource(triton.JITFunction.run)
    except (AttributeError, OSError, TypeError):
        return False
    return _LAUNCH in " ".join(source.split())


def cdiv(number: int, step: int) -> int:
    """Return number / step, rounded up. (`triton.cdiv` takes 5 us on the host.)"""
    return -(-number // step)


def next_power_of_2(number: int) -> int:
    """Return the lowest power of 2 that is not below a number of at least 1."""
    return 1 << (number - 1).bit_length()


def multiprocessors() -> int:
    """Return the multiprocessors of the current GPU; 2 without one, where kernels are emulated."""
    if not torch.cuda.is_available():
        return 2
    return torch.cuda.get_device_properties().multi_processor_count


def tma_aligned(tensor: Tensor) -> Tensor:
    """Return the tensor at an address that is a multiple of 16 bytes, as TMA needs; copy if not."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

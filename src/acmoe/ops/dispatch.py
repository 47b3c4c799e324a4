"""Choose the kernel that serves a call of an op, and log the choice.

An op is a function whose body is its definition in plain PyTorch. Faster kernels are registered
with it, each with a function that returns the reason why it cannot serve a call, or None:

    @op
    def route(tokens, embedding, bias, *, top_k): ...      # the definition: kernel "torch"

    @route.register("triton", unsupported=lambda tokens, top_k: None if top_k <= 16 else "...")
    def _(tokens, embedding, bias, *, top_k): ...

A call runs the first registered kernel that supports its arguments, and the definition where none
does. Callers never name a kernel. Users may request one:

    ACMOE_BACKEND=auto     the first kernel of each op that can serve the call
    ACMOE_BACKEND=NAME     kernel NAME where it can serve the call, else as auto, with a log line
"""

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from acmoe.errors import UserError
from acmoe.ops.environment import BACKEND, INTERPRET, STORED

P = ParamSpec("P")
R = TypeVar("R")

DEFINITION = "torch"  # the name of every op's plain-PyTorch definition
BACKENDS = ("auto", DEFINITION, "native", "cpu", "grouped_mm", "triton", "sonicmoe")
_ASKED = "ACMOE_BACKEND"
OPS: "dict[str, Op[..., Any]]" = {}  # every op of the library, by name

# Looked up once, because eager calls ask several times.
_any_transform = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiling = torch._C._autograd._profiler_enabled
_jit_trace = torch._C._get_tracing_state

_log = logging.getLogger("acmoe")
_logged: set[str] = set()
_requested: list[str] = []  # the innermost `use_backend`, if any
_records: "list[list[Choice]]" = []  # the lists that `record_choices` fills


class Kernel(NamedTuple):
    """One implementation of an op."""

    name: str
    run: Callable[..., Any]
    # Returns the reason why the kernel cannot serve these arguments, or None.
    unsupported: Callable[..., str | None]
    reads: tuple[str, ...]  # names of the op's arguments that `unsupported` takes
    automatic: bool = True  # False: it serves only if it is requested by name
    places: tuple[tuple[str, int], ...] = ()  # `reads`, each with its place among the arguments
    line: str = ""  # the log line that says that it runs


class Choice(NamedTuple):
    """The kernel that served one call, and the reasons why the others did not."""

    op: str
    kernel: str
    reasons: dict[str, str | None]  # by kernel name; None: that kernel could have served the call


class Op(Generic[P, R]):
    """A function with a definition in plain PyTorch and any number of faster kernels."""

    def __init__(self, definition: Callable[P, R]) -> None:
        functools.update_wrapper(self, definition)
        self.definition = definition
        self.name = definition.__name__
        parameters = inspect.signature(definition).parameters
        self.parameters = tuple(parameters)
        self.defaults = {
            name: one.default for name, one in parameters.items() if one.default is not one.empty
        }
        line = f"{self.name} runs on {DEFINITION}"
        plain = Kernel(DEFINITION, definition, _always, (), True, (), line)
        self.kernels: tuple[Kernel, ...] = (plain,)
        self.on_cpu: tuple[Kernel, ...] = (plain,)  # kernels that may serve without Triton

    def register(
        self,
        name: str,
        *,
        unsupported: Callable[..., str | None],
        automatic: bool = True,
        by_triton: bool = False,
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Register a kernel, to be tried after those registered before and before the definition.

        The parameters of `unsupported` are the arguments of the op that it reads, by their names.
        by_triton: the kernel refuses tensors on a CPU unless Triton's interpreter runs, so calls
        on a CPU skip it.
        """
        assert name in BACKENDS, name
        reads = tuple(inspect.signature(unsupported).parameters)
        assert set(reads) <= set(self.parameters), (self.name, name, reads)

        def add(run: Callable[..., R]) -> Callable[..., R]:
            places = tuple((one, self.parameters.index(one)) for one in reads)
            line = f"{self.name} runs on {name}"
            kernel = Kernel(name, run, unsupported, reads, automatic, places, line)
            self.kernels = (*self.kernels[:-1], kernel, self.kernels[-1])
            if not by_triton:
                self.on_cpu = (*self.on_cpu[:-1], kernel, self.on_cpu[-1])
            return run

        return add

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # `select` would do the same; to call it copies all arguments.
        kernel = self._first(args, kwargs) if _is_ordinary() else self.select(*args, **kwargs)
        found: R = kernel.run(*args, **kwargs)
        return found

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Kernel:
        """Return the kernel that serves a call with these arguments."""
        if _is_ordinary():
            return self._first(args, kwargs)
        if transforming():
            return self.kernels[-1]
        values = {**self.defaults, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        wanted = requested()
        refusal = None
        for kernel in self.kernels if wanted != "auto" else ():
            if kernel.name == wanted:
                refusal = self._reason(kernel, values)
                if refusal is None:
                    self._note(kernel, values)
                    return kernel
        for kernel in self.kernels:
            if kernel.automatic and self._reason(kernel, values) is None:
                self._note(kernel, values, wanted, refusal)
                return kernel
        raise AssertionError(f"the definition of {self.name} serves every call")

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kernel:
        """Log and return the first kernel that supports the call; none is requested by name.

        Eager calls spend a good part of the host's time here, so the loop below is written out: a
        comprehension would be one more call of Python.
        """
        given, kernels = len(args), self.kernels
        if given and INTERPRET not in STORED and getattr(args[0], "is_cpu", False):
            kernels = self.on_cpu
        for kernel in kernels:
            if not kernel.automatic:
                continue
            values = []
            for name, at in kernel.places:
                if at < given:
                    values.append(args[at])
                else:
                    values.append(kwargs[name] if name in kwargs else self.defaults.get(name))
            if kernel.unsupported(*values) is None:
                if kernel.line not in _logged:
                    log_once(kernel.line)
                return kernel
        raise AssertionError(f"the definition of {self.name} serves every call")

    def reasons(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, str | None]:
        """Return for each kernel the reason why it cannot serve these arguments; None: it can."""
        values = {**self.defaults, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        return {kernel.name: self._reason(kernel, values) for kernel in self.kernels}

    def _reason(self, kernel: Kernel, values: dict[str, Any]) -> str | None:
        return kernel.unsupported(**{name: values[name] for name in kernel.reads})

    def _note(
        self,
        kernel: Kernel,
        values: dict[str, Any],
        wanted: str = "",
        refusal: str | None = None,
    ) -> None:
        """Log the choice once, and append it to the lists of `record_choices`."""
        if is_compiling():
            return
        if refusal is not None:
            line = f"{self.name}: {wanted} cannot serve, {refusal}; running on {kernel.name}"
            log_once(line, logging.WARNING)
        else:
            log_once(kernel.line)
        if _records:
            reasons = {one.name: self._reason(one, values) for one in self.kernels}
            for choices in _records:
                choices.append(Choice(self.name, kernel.name, reasons))


def op(definition: Callable[P, R]) -> Op[P, R]:
    """Make a plain function the definition of an op."""
    found = Op(definition)
    assert found.name not in OPS, f"two ops are named {found.name}"
    OPS[found.name] = found
    return found


def _always() -> str | None:
    return None


@contextlib.contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """Collect the choice of every op that is called inside `with`."""
    choices: list[Choice] = []
    _records.append(choices)
    try:
        yield choices
    finally:
        _records.remove(choices)


def requested() -> str:
    """Return the backend that `use_backend` or ACMOE_BACKEND requests."""
    return _requested[-1] if _requested else _checked(os.environ.get(_ASKED, "auto"))


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Request a backend inside `with`, as ACMOE_BACKEND does for a whole process."""
    _requested.append(_checked(name))
    try:
        yield
    finally:
        _requested.pop()


def _checked(name: str) -> str:
    if name not in BACKENDS:
        raise UserError(f"ACMOE_BACKEND={name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    return name


def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line of the "acmoe" logger the first time it occurs in this process."""
    if line not in _logged:
        _logged.add(line)
        _log.log(level, line)


# With this mark torch.compile runs `log_once` while it traces, and leaves the call, which it could
# not trace, out of the graph. torch.compiler.assume_constant_result sets the same mark, but imports
# Dynamo.
log_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_ordinary() -> bool:
    """Return True if the first kernel that supports a call serves it.

    That is not so if a kernel is requested by name, if choices are recorded with their reasons, and
    if a compiler or transform runs.
    """
    return not (
        is_dynamo_compiling()
        or _records
        or (_requested[-1] != "auto" if _requested else BACKEND in STORED)
        or _any_transform()
        or forward_ad._current_level >= 0
    )


def transforming() -> bool:
    """Return True inside `torch.func` transforms (grad, jvp, vmap, ...) and forward-mode autograd.

    Transforms differentiate and batch PyTorch's own operators and know nothing of kernels, so every
    op runs its definition there, written in plain operators throughout (docs/design.md,
    Transforms).
    """
    return not is_compiling() and (_any_transform() or forward_ad._current_level >= 0)


def rewriting() -> bool:
    """Return True while a compiler traces the call, or if `transforming` does."""
    return is_compiling() or _any_transform() or forward_ad._current_level >= 0


def eager(*tensors: Tensor | None) -> bool:
    """Return True if a kernel may be launched right away, without a custom op around it.

    A custom op makes a call visible from outside: to `torch.compile` and `torch.jit.trace`, fake
    and other subclasses of tensors, dispatch and function modes, transforms of `torch.func`, and
    profilers, which show its name. It costs 40 to 80 us of the host. The caller must make sure that
    no gradient is recorded.

    The function checks for Dynamo alone among compilers, which saves a call of Python: all others
    trace subclasses of tensors or use dispatch modes, which it checks anyway.

    A profiler changes nothing on a CPU. There it sees the operators of PyTorch, and the functions
    in C by `record_function`.
    """
    if not untraced(*tensors):
        return False
    return not _profiling() or all([one is None or one.is_cpu for one in tensors])


def untraced(*tensors: Tensor | None) -> bool:
    """Return True as `eager` does, but also under profilers, which then show the kernel alone.

    It serves kernels without a custom op. With `eager` they would not run under a profiler, which
    would show what does not run without one.
    """
    return (
        not is_dynamo_compiling()
        and not _any_transform()
        and forward_ad._current_level < 0
        and _dispatch_modes() == 0
        and _function_modes() == 0
        and _jit_trace() is None
        and _PLAIN.issuperset(map(type, tensors))
    )


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}

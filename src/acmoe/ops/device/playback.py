"""Write the steps of a tape (recording.py) as a Python function without loops.

A loop over steps and arguments would take the host twice as long. This is the function of a call
with one launch, a tensor in the buffer and one result:

    def play(given, addresses, stream):
        a0, a1, = addresses
        t4 = empty((512,), (1,), c1)
        a4 = t4.data_ptr()
        t2 = empty((8, 4), (4, 1), c2)
        a2 = t2.data_ptr()
        c5(1, 1, 1, stream, c3, c4, None, None, None, a0, a1 + 64, a4, a2, 8, 4)
        return t2,

t and a are the tensor and the address of a slot (the last one is the buffer), c a constant. c5 is
the launcher of the kernel, or what it calls if that is known (direct.py). A TMA descriptor of the
memory at a0 is c6(a0), or *c6(a0) where it is encoded for the driver.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acmoe.ops.device.direct import NUM_FIRST, Encoding, Mark, Passed, encoded, passed_on
from acmoe.ops.device.recording import Descriptor, Layout, Results, Step, Steps
from acmoe.ops.dispatch import log_once

Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
Play = Callable[[tuple[Tensor | None, ...], list[int], int], Results]


def write_play(recorded: Steps, num_given: int, empty: Allocator) -> Play:
    """Return a function (given, addresses, stream) -> results that repeats the recorded steps.

    given, addresses: the tensors of the call, `num_given` in all, and where their memory begins.
    """
    writer = _Writer(num_given, empty)
    addresses = "".join(f"a{slot}, " for slot in range(num_given))
    writer.lines += ["def play(given, addresses, stream):", f"    {addresses}= addresses"]
    if recorded.num_bytes:
        layout: Layout = ((recorded.num_bytes,), (1,), torch.uint8)
        writer.allocate(recorded.num_slots, layout)
    for step in recorded.steps:
        writer.add(step)
    results = "".join(f"t{slot}, " for slot in recorded.order)
    writer.lines.append(f"    return {results or '()'}")
    exec("\n".join(writer.lines), writer.names)
    play: Play = writer.names["play"]
    return play


class _Writer:
    """The lines of the function, and the values of the names in it."""

    def __init__(self, num_given: int, empty: Allocator) -> None:
        self.num_given = num_given
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"empty": empty}

    def allocate(self, slot: int, layout: Layout) -> None:
        shape, strides, dtype = layout
        self._assign(slot, f"empty({tuple(shape)}, {tuple(strides)}, {self._constant(dtype)})")

    def add(self, step: Step) -> None:
        for slot, layout in step.made:
            self.allocate(slot, layout)
        if step.run is None:
            function, operands, slot = step.head
            tensors = ", ".join(map(self._tensor, operands))
            self._assign(slot, f"{self._constant(function)}({tensors})")
        else:
            self._launch(step)
        self.lines += [f"    t{slot} = None" for slot in step.freed]

    def _launch(self, step: Step) -> None:
        replaced = {at: _address(slot, offset) for at, slot, offset in step.pointers}
        described = {}
        for at, slot, offset, descriptor in step.described:
            address = _address(slot, offset)
            replaced[at] = f"{self._constant(descriptor.at)}({address})"
            described[NUM_FIRST + at] = descriptor, address
        values = [
            replaced[at] if at in replaced else self._constant(value)
            for at, value in enumerate(step.values)
        ]
        x, y, z, function, metadata = map(self._constant, step.head)
        first = [x, y, z, "stream", function, metadata]
        passed = passed_on(step.run, len(values))
        if passed is None:
            log_once("a kernel is launched by Triton's own launcher, which takes longer")
            self._call(step.run, [*first, *["None"] * 3, *values])
        elif not (described and self._launch_encoded(passed, [*first, *values], described)):
            given = [*first, *values]
            self._call(passed.launch, [self._passed(one, given) for one in passed.arguments])

    def _launch_encoded(
        self, passed: Passed, given: list[str], described: dict[int, tuple[Descriptor, str]]
    ) -> bool:
        """Write a launch with encoded descriptors; return False if it is not known how.

        described: each descriptor and its address, by its place among the given arguments.
        """
        inner = encoded(passed.launch, len(passed.arguments))
        if inner is None:
            return False
        arguments, places = [], []
        for one in inner.arguments:
            outer = passed.arguments[one.place]
            if type(one) is not Encoding:
                arguments.append(self._passed(outer, given))
            elif type(outer) is Mark and outer.place in described:
                descriptor, address = described[outer.place]
                find = descriptor.encoded(one.encode, one.metadata)
                arguments.append(f"*{self._constant(find)}({address})")
                places.append(outer.place)
        if sorted(places) != sorted(described) or len(arguments) != len(inner.arguments):
            return False
        self._call(inner.launch, arguments)
        return True

    def _call(self, function: Any, arguments: list[str]) -> None:
        self.lines.append(f"    {self._constant(function)}({', '.join(arguments)})")

    def _passed(self, one: Any, given: list[str]) -> str:
        """Return an argument of `Passed`; given: the arguments of the launcher, without hooks."""
        if type(one) is Mark:
            return given[one.place]
        if type(one) is tuple and one and type(one[0]) is Mark:
            return "(" + "".join(f"{given[mark.place]}, " for mark in one) + ")"
        return self._constant(one)

    def _assign(self, slot: int, tensor: str) -> None:
        self.lines += [f"    t{slot} = {tensor}", f"    a{slot} = t{slot}.data_ptr()"]

    def _tensor(self, slot: int) -> str:
        return f"given[{slot}]" if slot < self.num_given else f"t{slot}"

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name


def _address(slot: int, offset: int) -> str:
    return f"a{slot} + {offset}" if offset else f"a{slot}"

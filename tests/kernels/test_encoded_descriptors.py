"""A tape encodes a TMA descriptor once for each address, and passes what Triton would pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acmoe.ops.device import recording
from acmoe.ops.device.direct import encoded
from acmoe.ops.device.playback import write_play
from acmoe.ops.device.recording import Descriptor, Pointer, Step, Steps

NUM_FIRST = 10  # arguments of `launch` before those of the kernel: see `Launcher`
encodings: list[int] = []  # the address of each descriptor that was encoded


def make_tensordesc_arg(descriptor: Any, metadata: Any) -> list[Any]:
    """Encode as Triton 3.6 does: a map for the driver, then sizes."""
    encodings.append(descriptor.base.data_ptr())
    return [("map", descriptor.base.data_ptr(), metadata["swizzle"]), *descriptor.shape]


def wrapped(launcher: Any, places: set[int], metadata: list[Any]) -> Any:
    """Return the `launch` of a kernel with descriptors, written as that of Triton 3.6."""

    def inner(*arguments: Any) -> Any:
        final = list(arguments[:NUM_FIRST])
        number = 0
        for at, one in enumerate(arguments[NUM_FIRST:]):
            if at in places:
                final.extend(make_tensordesc_arg(one, metadata[number]))
                number += 1
            else:
                final.append(one)
        return launcher(*final)

    return inner


def dropping(launcher: Any, places: set[int], metadata: list[Any]) -> Any:
    """Return a `launch` that leaves the last argument out."""

    def inner(*arguments: Any) -> Any:
        end = arguments[NUM_FIRST + 1 : -1]
        return launcher(
            *arguments[:NUM_FIRST], *make_tensordesc_arg(arguments[NUM_FIRST], metadata[0]), *end
        )

    return inner


def renamed(driver: Any, places: set[int], metadata: list[Any]) -> Any:
    """Return a `launch` whose driver has another name."""
    launch = wrapped(driver, places, metadata)
    return lambda *arguments: launch(*arguments)


class Launcher:
    """A launcher as Triton's, which adds one argument of its own."""

    def __init__(self, launch: Any) -> None:
        self.launch, self.cooperative = launch, False

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, self.cooperative, *rest)


def playing(run: Any) -> Any:
    """Return the player of a step with the descriptors of slots 0 and 1, and two numbers."""
    head = (3, 2, 1, "function", "metadata")
    made = SimpleNamespace(shape=[8, 64], block_shape=[8, 64], base=None)
    ones = [Descriptor(Pointer(slot, 0), made, torch.bfloat16) for slot in range(2)]
    values = [ones[0], 5, ones[1], 0.5]
    described = ((0, 0, 0, ones[0]), (2, 1, 128, ones[1]))
    step = Step((), run, head, values, (), described, ())
    return write_play(Steps((step,), 2, 0, ()), 2, lambda *layout: torch.empty(0))


@pytest.mark.parametrize(("wrap", "known"), [(wrapped, True), (dropping, False), (renamed, False)])
def test_the_driver_gets_what_triton_would_pass(wrap: Any, known: bool) -> None:
    noted: list[tuple[Any, ...]] = []
    run = Launcher(wrap(lambda *a: noted.append(a), {0, 2}, [{"swizzle": 3}, {"swizzle": 1}]))
    assert (encoded(run.launch, NUM_FIRST + 4) is not None) == known
    play = playing(run)
    encodings.clear()
    play((None, None), [1024, 4096], 7)
    (found,) = noted
    first = (3, 2, 1, 7, "function", False, "metadata", None, None, None)
    if wrap is dropping:
        assert found == (*first, ("map", 1024, 3), 8, 64, 5, found[-1])
        return
    assert found == (*first, ("map", 1024, 3), 8, 64, 5, ("map", 4096 + 128, 1), 8, 64, 0.5)
    play((None, None), [1024, 8192], 8)  # another address and another stream
    assert noted[1][3] == 8 and noted[1][10:13] == found[10:13]
    assert noted[1][14] == ("map", 8192 + 128, 1)
    times = 1 if known else 2
    assert encodings.count(1024) == times and encodings.count(8192 + 128) == 1


def test_few_addresses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two addresses, the third takes the place of the first."""
    monkeypatch.setattr(recording, "MOST_ADDRESSES", 2)
    made = SimpleNamespace(shape=[8], block_shape=[8], base=None)
    find = Descriptor(Pointer(0, 0), made, torch.bfloat16).encoded(
        make_tensordesc_arg, {"swizzle": 0}
    )
    encodings.clear()
    for address in (16, 32, 32, 48, 16):
        assert find(address) == [("map", address, 0), 8]
    assert encodings == [16, 32, 48, 16]


def test_the_launch_of_triton_36_is_known() -> None:
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.6."):
        pytest.skip("the launch of other versions is called as it is")
    signature = {"x": "tensordesc<bf16[64, 64]>", "n": "i32"}
    launch = nvidia.wrap_handle_tensordesc(print, signature, [{"swizzle": 3}])
    found = encoded(launch, nvidia._BASE_ARGS_FORMAT_LEN + 2)
    assert found is not None and found.launch is print
    *first, descriptor, last = found.arguments
    assert descriptor == (len(first), nvidia.make_tensordesc_arg, {"swizzle": 3})
    assert last.place == len(first) + 1

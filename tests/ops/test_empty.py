"""Tensors without elements are shared by eager calls alone."""

import torch

from acmoe.ops.empty import no_elements, shared_empty


def test_eager_calls_share_a_tensor_and_others_get_their_own() -> None:
    like = torch.zeros(3)
    shared = no_elements((0, 2), torch.int8, like)
    assert shared.shape == (0, 2) and shared.dtype == torch.int8
    assert no_elements((0, 2), torch.int8, like) is shared
    assert shared_empty((0, 2), torch.int8, like.device) is shared
    assert no_elements((0, 2), torch.int16, like) is not shared
    with torch.inference_mode():  # autograd could not save an inference tensor later
        inside = no_elements((0, 2), torch.int8, like)
    assert inside.is_inference() and not no_elements((0, 2), torch.int8, like).is_inference()

    def mapped(one: torch.Tensor) -> torch.Tensor:
        assert no_elements((0, 2), torch.int8, like) is not shared
        return one

    torch.func.vmap(mapped)(like)


def test_a_compiled_call_makes_its_own() -> None:
    def empty(like: torch.Tensor) -> torch.Tensor:
        return no_elements((0, 2), torch.int8, like)

    like = torch.zeros(3)
    found = torch.compile(empty, backend="eager", fullgraph=True)(like)
    assert found is not empty(like) and found.shape == (0, 2) and found.dtype == torch.int8

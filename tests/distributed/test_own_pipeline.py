"""A pipeline that a user builds from torch's stages, which send the whole routing state."""

import copy

import torch
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import acmoe
from slow_cases import mostly_slow

STEPS, MICRO, SHAPE = 3, 2, (3, 7, 8)


class Stage(nn.Module):
    """Two layers; it returns x and all tensors of the state, or x and the auxiliary loss."""

    def __init__(self, layers: nn.ModuleList, last: bool) -> None:
        super().__init__()
        self.layers, self.last = layers, last

    def forward(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = acmoe.RoutingState(*tensors) if tensors else None
        for layer in self.layers:
            y, state = layer(x, state)
            x = x + y
        assert state is not None
        return (x, state.aux_loss[None]) if self.last else (x, *state)


def stages(statistics: str) -> list[Stage]:
    torch.manual_seed(0)
    router = acmoe.AdaptiveConfig(statistics=statistics)
    sizes = {"dim": 8, "hidden": 4, "num_experts": 4, "top_k": 2}
    layers = [acmoe.MoE(**sizes, router=router).double() for _ in range(4)]
    model = nn.ModuleList(layers)
    acmoe.set_statistics_group(model, None)  # no other process has these layers
    return [Stage(model[:2], last=False), Stage(model[2:], last=True)]


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(MICRO * SHAPE[0], *SHAPE[1:], generator=generator, dtype=torch.float64)


def loss_of(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    x, aux_loss = outputs
    return (x - target).square().mean() + aux_loss[0]


def in_a_pipeline(rank: int, statistics: str) -> dict[str, Tensor]:
    model = stages(statistics)
    arguments, found = (torch.empty(SHAPE, dtype=torch.float64, device="meta"),), []
    for stage in copy.deepcopy(model):
        outputs = stage.to("meta")(*arguments)
        found.append((arguments, outputs))
        arguments = outputs
    inputs, outputs = found[rank]
    stage = PipelineStage(
        model[rank], rank, 2, torch.device("cpu"), input_args=inputs, output_args=outputs
    )
    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.SGD(model[rank].parameters(), lr=0.1)
    for step in range(STEPS):
        if rank == 0:
            schedule.step(batch(step))
        else:
            schedule.step(target=torch.zeros(MICRO * SHAPE[0], *SHAPE[1:]))
        optimizer.step()
        optimizer.zero_grad()
    return model[rank].state_dict()


def in_one_process(statistics: str) -> list[dict[str, Tensor]]:
    first, last = model = stages(statistics)
    optimizer = torch.optim.SGD(nn.ModuleList(model).parameters(), lr=0.1)
    for step in range(STEPS):
        for x in batch(step).chunk(MICRO):
            (loss_of(last(*first(x)), torch.zeros(())) / MICRO).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [stage.state_dict() for stage in model]


@mostly_slow("statistics", ["running", "prefix"], keep=[1])
def test_stages_that_send_the_state_train_as_one_process(statistics, tmp_path):
    found = in_ranks(2, in_a_pipeline, statistics, folder=tmp_path)
    for one, expected in zip(found, in_one_process(statistics), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)

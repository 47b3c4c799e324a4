"""The synthetic study: does adaptive clustering find known clusters faster, as the theory says?

A run trains one or two MoE layers on the task of task.py. It measures during training how
well each token's first expert agrees with the cluster the token was drawn from.

T tokens, D features, O outputs.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.data.seeding import derive_seed
from acmoe.errors import NonFiniteError
from acmoe.evaluate.measures import load_balance
from acmoe.lab.study.cells.outcome import curve_mean
from acmoe.lab.study.cells.scale_statistics import scale_statistics
from acmoe.lab.study.synthetic.measures import (
    adjusted_rand,
    condition_number,
    correlation_with_truth,
    scale_used,
    steps_to,
)
from acmoe.lab.study.synthetic.model import Pass, SyntheticModel
from acmoe.lab.study.synthetic.task import Batch, SyntheticConfig, SyntheticTask
from acmoe.models.recorded import recorded
from acmoe.ops.route.reference import load
from acmoe.routing.state import Routing, first_choice
from acmoe.train.optim import adam


def run_synthetic(config: SyntheticConfig, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Train, and return {"metrics": name -> number, "curves": name -> list}.

    Tokens, teachers and initial weights depend on the seed and not on the router.
    """
    device = torch.device(device)
    task = SyntheticTask(config)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(derive_seed(config.seed, "synthetic", "weights"))
        model = SyntheticModel(config, task).to(device)
        # The random router draws from the global generator, and other routers are initialised with
        # more or fewer draws from it.
        torch.manual_seed(derive_seed(config.seed, "synthetic", "training"))
        curves = _train(config, task, model, device)
        metrics = _curve_metrics(config, curves) | _final_metrics(config, task, model, device)
    return {"metrics": metrics, "curves": curves}


def _train(
    config: SyntheticConfig, task: SyntheticTask, model: SyntheticModel, device: torch.device
) -> dict[str, list[float]]:
    optimizers = _optimizers(config, model)
    draw = torch.Generator().manual_seed(derive_seed(config.seed, "synthetic", "batches"))
    held_out = _held_out(config, task, device)
    curves: dict[str, list[float]] = {"step": [], "loss": [], "ari": [], "ari_first": []}
    for step in range(config.steps + 1):
        if step % config.eval_every == 0 or step == config.steps:
            _append_scores(curves, step, config, model, held_out)
        if step == config.steps:
            break
        batch = _to(task.sample(config.batch, draw), device)
        out = model(batch.x, batch.cluster)
        loss = nn.functional.mse_loss(out.prediction, batch.target) + out.aux_loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return curves


def _optimizers(config: SyntheticConfig, model: SyntheticModel) -> list[torch.optim.Optimizer]:
    # `next_state` holds the strength that the next router learns.
    layers = [model.moe(depth) for depth in range(config.layers)]
    routers = nn.ModuleList([part for layer in layers for part in (layer.router, layer.next_state)])
    others = nn.ModuleList([*(layer.experts for layer in layers), model.norms, model.readout])
    options: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    rest = adam(others, lr=config.lr, **options)
    if config.router_optimizer == "sgd":
        return [rest, torch.optim.SGD(routers.parameters(), lr=config.router_lr)]
    return [rest, adam(routers, lr=config.router_lr, **options)]


def _held_out(
    config: SyntheticConfig, task: SyntheticTask, device: torch.device, contamination: float = 0.0
) -> Batch:
    """Draw held-out tokens: the same at every noise level, only the added noise differs."""
    draw = torch.Generator().manual_seed(derive_seed(config.seed, "synthetic", "held-out"))
    return _to(task.sample(config.held_out, draw, contamination=contamination), device)


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(part.to(device) for part in batch))


@torch.no_grad()
def _evaluate(model: SyntheticModel, batch: Batch) -> tuple[Pass, list[Routing], float]:
    """Run in evaluation mode; return output, routings and the unexplained share of variance."""
    model.eval()
    with recorded([model.moe(depth) for depth in range(len(model.layers))]) as routings:
        out: Pass = model(batch.x, batch.cluster)
    model.train()
    error = (out.prediction - batch.target).square().mean()
    variance = (batch.target - batch.target.mean(0)).square().mean()
    loss = float(error / variance)
    if not math.isfinite(loss):
        raise NonFiniteError(f"the held-out loss is {loss}: the run has diverged; try a lower lr")
    return out, routings, loss


def _first_choices(routings: list[Routing]) -> list[Tensor]:
    """Return (T,) the first expert of each token, for each layer."""
    return [first_choice(routing) for routing in routings]


def _append_scores(
    curves: dict[str, list[float]],
    step: int,
    config: SyntheticConfig,
    model: SyntheticModel,
    held_out: Batch,
) -> None:
    """Append the held-out loss, and the agreement with the clusters, to the curves."""
    _, routings, loss = _evaluate(model, held_out)
    size = config.clusters.num_clusters
    first, last = (
        adjusted_rand(chosen_T, held_out.cluster, size)
        for chosen_T in (_first_choices(routings)[0], _first_choices(routings)[-1])
    )
    curves["step"].append(step)
    curves["loss"].append(loss)
    curves["ari"].append(last)
    curves["ari_first"].append(first)


def _curve_metrics(config: SyntheticConfig, curves: dict[str, list[float]]) -> dict[str, float]:
    steps = [int(step) for step in curves["step"]]
    reached = steps_to(config.threshold, steps, curves["ari"])

    def mean(name: str) -> float:
        return curve_mean(list(zip(steps, curves[name], strict=True)))

    return {
        "loss": curves["loss"][-1],
        "loss_area": mean("loss"),
        "ari": curves["ari"][-1],
        "ari_area": mean("ari"),
        "ari_first": curves["ari_first"][-1],
        # With two layers, either of them may be the one that finds the clusters.
        "ari_best": max(curves["ari"][-1], curves["ari_first"][-1]),
        # A run that never reaches the threshold counts with all its steps; see `reached`.
        "steps_to_threshold": config.steps if reached is None else reached,
        "reached": float(reached is not None),
    }


def _final_metrics(
    config: SyntheticConfig, task: SyntheticTask, model: SyntheticModel, device: torch.device
) -> dict[str, float]:
    held_out = _held_out(config, task, device)
    out, routings, _ = _evaluate(model, held_out)
    size = config.clusters.num_clusters
    load_E = load(routings[-1].expert_ids, size)
    chosen_T = _first_choices(routings)[-1]
    metrics = {
        "load_balance": load_balance(load_E),
        "dead_experts": float((load_E == 0).sum()),
        **_scale_metrics(config, task, model, out, held_out),
    }
    if config.rescales:
        # Does the router repeat the clusters of the previous layer, or form its own?
        previous_T = out.states[-1].assignment[:, 0]
        metrics["ari_told"] = adjusted_rand(previous_T, held_out.cluster, size)
        metrics["ari_repeated"] = adjusted_rand(chosen_T, previous_T, size)
    for noise in config.contamination:
        noisy = _held_out(config, task, device, noise)
        _, routings, loss = _evaluate(model, noisy)
        first_T = _first_choices(routings)[-1]
        metrics[f"loss_noise_{noise:g}"] = loss
        metrics[f"ari_noise_{noise:g}"] = adjusted_rand(first_T, noisy.cluster, size)
        metrics[f"kept_noise_{noise:g}"] = float((first_T == chosen_T).double().mean())
    return metrics


@torch.no_grad()
def _scale_metrics(
    config: SyntheticConfig, task: SyntheticTask, model: SyntheticModel, out: Pass, batch: Batch
) -> dict[str, float]:
    """Return the conditioning of the last router's inputs, and statistics of its scale."""
    router, x_TD, state = model.moe(config.layers - 1).router, out.inputs[-1], out.states[-1]
    model.eval()
    scale_CD = scale_used(router, x_TD, state)
    metrics = {
        "condition": condition_number(router.rescale(x_TD, state).dense()),
        "condition_plain": condition_number(x_TD),
    }
    model.train()
    if scale_CD is None:
        return metrics
    scale_CD, assignment_T = scale_CD.cpu(), state.assignment[:, 0].cpu()
    occupied_C = assignment_T.bincount(minlength=len(scale_CD)) >= 2
    found = scale_statistics(scale_CD, occupied_C)
    stds_CD = task.stds(config.layers - 1)
    truth = correlation_with_truth(scale_CD, assignment_T, batch.cluster.cpu(), stds_CD)
    return metrics | {
        "scale_rms_log": found.rms_log,
        "scale_common": found.common,
        "scale_truth": truth,
    }

"""The schedule by hand, and Adam against its definition."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from acmoe.train.optim import adam, learning_rate, optimizer_tensors, restore_optimizer
from tiny_runs import byte_corpus, tiny_run


def test_warmup_is_a_line_whose_first_update_is_lr_over_warmup(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "lr=0.8", "warmup=4", "steps=10")
    rates = [learning_rate(config, step) for step in range(1, 8)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8])


def test_cosine_falls_from_lr_to_min_lr_at_the_last_step(tmp_path: Path) -> None:
    overrides = ("lr=1.0", "min_lr=0.2", "warmup=2", "steps=10", "schedule=cosine")
    config = tiny_run(byte_corpus(tmp_path), *overrides)
    # 8 steps after the warmup: step 6 is half way, where the cosine is 0 and lr (1 + 0.2) / 2;
    # step 4 is a quarter of the way: 0.2 + 0.8 (1 + cos 45 degrees) / 2.
    quarter = 0.2 + 0.4 * (1 + math.sqrt(0.5))
    rates = {step: learning_rate(config, step) for step in (1, 2, 4, 6, 10)}
    assert rates == pytest.approx({1: 0.5, 2: 1.0, 4: quarter, 6: 0.6, 10: 0.2})


def test_without_warmup_or_steps_behind_it_the_rate_is_lr(tmp_path: Path) -> None:
    config = tiny_run(byte_corpus(tmp_path), "warmup=0", "steps=1", "schedule=cosine", "min_lr=0.0")
    assert learning_rate(config, 1) == pytest.approx(0.0)  # the only step is the last
    config = tiny_run(tmp_path / "corpus", "warmup=30", "steps=20")
    assert learning_rate(config, 20) == pytest.approx(config.lr * 20 / 30)


def test_updates_are_adams_with_decay_on_matrices_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adam(model, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5)
    model(torch.ones(1, 3).double()).sum().backward()
    optimizer.step()
    # Each gradient is 1, so after bias correction m = v = 1 and the step is lr / (1 + eps); decay
    # takes lr * 0.5 of the matrix beforehand and nothing of the bias.
    assert torch.allclose(model.weight, start["weight"] * 0.95 - 0.1, atol=1e-6)
    assert torch.allclose(model.bias, start["bias"] - 0.1, atol=1e-6)


def test_the_optimizers_state_goes_out_and_comes_back() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    one, two = adam(first, **settings), adam(second, **settings)  # type: ignore[arg-type]
    first(torch.ones(1, 3)).square().sum().backward()
    one.step()
    second.load_state_dict(first.state_dict())
    saved = {name: value.clone() for name, value in optimizer_tensors(one, first).items()}
    restore_optimizer(two, second, saved)
    for model, optimizer in ((first, one), (second, two)):
        optimizer.zero_grad()
        model(torch.arange(3.0)[None]).square().sum().backward()
        optimizer.step()
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_a_flagged_update_leaves_weights_and_moments_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = adam(model, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = [
        value.clone() for value in (model.weight, *optimizer_tensors(optimizer, model).values())
    ]
    model.weight.grad = torch.full((2, 3), torch.nan)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    after = [model.weight, *optimizer_tensors(optimizer, model).values()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

"""`key=value` on dotted names: what it reaches, and the one line for everything it cannot."""

import contextlib
from functools import reduce

import pytest

from acmoe.config.images.train import VisionRunConfig, override_vision_run
from acmoe.config.overrides import keys
from acmoe.config.routing import AdaptiveConfig, SMoEConfig, StableConfig
from acmoe.config.text.language import LANGUAGE_MODELS
from acmoe.config.text.train import RunConfig, override_run
from acmoe.errors import UserError
from acmoe.recipes import recipe

RUN = RunConfig(model=LANGUAGE_MODELS["switch-nano"].config, steps=10, batch=4, lr=1e-3)


def test_values_take_the_type_of_their_field() -> None:
    pairs = (
        *("steps=200", "lr=1e-2", "compile=true", "clip=1", "data.limit=none", "schedule=cosine"),
        *("betas=0.8,0.95", "model.layers=moe,ffn", "model.placement=1,2", "data.folder=/a=b"),
    )
    run = override_run(RUN, pairs)
    assert (run.steps, run.lr, run.compile, run.clip) == (200, 0.01, True, 1.0)
    assert (run.data.limit, run.schedule, run.betas) == (None, "cosine", (0.8, 0.95))
    assert (run.model.layers, run.model.placement) == (("moe", "ffn"), (1, 2))
    assert run.data.folder == "/a=b"
    assert isinstance(run.clip, float)


def test_fields_that_must_agree_are_changed_together_in_any_order() -> None:
    # 64 features on 5 heads, or 50 on 4, would both be refused.
    for pairs in (("model.dim=50", "model.heads=5"), ("model.heads=5", "model.dim=50")):
        model = override_run(RUN, pairs).model
        assert (model.dim, model.heads) == (50, 5)


def test_a_router_is_named_and_its_parts_are_set() -> None:
    pairs = ("model.router.statistics=prefix", "model.router=adaptive", "model.router.mix=2")
    router = override_run(RUN, pairs).model.router
    # In a language model a linear gate has a bias, as the baseline's has.
    base = SMoEConfig(bias=True)
    assert router == AdaptiveConfig(statistics="prefix", mix=2, base=base)


def test_the_base_of_an_adaptive_router_is_named_too() -> None:
    pairs = ("model.router=adaptive", "model.router.base=cosine", "model.router.base.proj_dim=3")
    router = override_run(RUN, pairs).model.router
    assert isinstance(router, AdaptiveConfig)
    assert (router.base.name, getattr(router.base, "proj_dim", None)) == ("cosine", 3)


def test_stablemoe_learns_the_vocabulary_the_model_ends_up_with() -> None:
    for pairs in (("model.router=stable", "model.vocab_size=99"), ("model.vocab_size=99",)):
        run = override_run(override_run(RUN, ("model.router=stable",)), pairs)
        assert run.model.router == StableConfig(vocab_size=99)


@pytest.mark.parametrize("recipe_name", ["switch-nano-acmoe", "swin-nano-acmoe", "softmoe-nano"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_no_number_of_a_run_is_nan_or_infinite(recipe_name: str, value: str) -> None:
    # JSON has neither: config.json could not be written, and training ended in a traceback.
    run = recipe(recipe_name)
    override = override_vision_run if isinstance(run, VisionRunConfig) else override_run
    accepted = {}
    for key in keys(run):
        for count in (1, 2, 3):  # some settings are pairs or triples of numbers
            pair = f"{key}={','.join([value] * count)}"
            with contextlib.suppress(UserError):
                accepted[pair] = reduce(getattr, key.split("."), override(run, [pair]))  # type: ignore
    assert {pair: found for pair, found in accepted.items() if not isinstance(found, str)} == {}


@pytest.mark.parametrize("key", ["model.router.vocab_size", "model.router.base.vocab_size"])
def test_stablemoe_takes_no_other_vocabulary_than_the_models(key: str) -> None:
    router = ["model.router=stable"]
    if "base" in key:
        router = ["model.router=adaptive", "model.router.base=stable"]
    run = override_run(RUN, router)
    assert override_run(RUN, [*router, f"{key}=256"]) == run
    with pytest.raises(UserError, match=f"{key}=300: .* of which there are 256; leave it out"):
        override_run(RUN, [*router, f"{key}=300"])


def test_a_warmup_in_updates_is_whole() -> None:
    run = recipe("swin-nano")
    assert isinstance(run, VisionRunConfig)
    assert override_vision_run(run, ["warmup=3"]).warmup_updates(20) == 3
    # 0.5 was rounded to no warmup at all; in epochs of 20 updates it is 10 of them.
    with pytest.raises(UserError, match=r"warmup=0\.5 is a number of updates, as steps=240 is"):
        override_vision_run(run, ["warmup=0.5"])
    assert override_vision_run(run, ["epochs=2", "warmup=0.5"]).warmup_updates(20) == 10


def test_nothing_asked_is_nothing_changed() -> None:
    assert override_run(RUN, ()) == RUN


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ("stesp=1", "setting stesp is unknown; did you mean steps?"),
        ("model.dimm=3", "setting model.dimm is unknown; did you mean model.dim?"),
        ("model.router.gat=all", "did you mean model.router.gate?"),
        ("model.router.balance_temp=1", "did you mean model.router.balance_temperature?"),
        ("dim=64", "setting dim is unknown; did you mean model.dim?"),
        ("qqq=1", "setting qqq is unknown; the run has model, data, steps"),
        ("model.qqq=1", "setting model.qqq is unknown; model has "),
        ("steps=abc", "steps='abc'; it must be a whole number"),
        ("steps=1.5", "steps='1.5'; it must be a whole number"),
        ("steps=", "steps=''; it must be a whole number"),
        ("seed=9223372036854775808", "it must be a whole number that fits into 64 bits"),
        ("lr=fast", "lr='fast'; it must be a number"),
        ("lr=nan", "lr=nan; it must be positive and finite"),
        ("clip=soft", "clip='soft'; it must be a number or none"),
        ("compile=yes", "compile='yes'; it must be true or false"),
        ("schedule=linear", "schedule='linear'; it must be one of constant, cosine"),
        ("betas=0.9", "it must be 2 values separated by commas, each a number"),
        ("model.layers=moe,foo", "a list separated by commas, each one of moe, ffn"),
        ("model.router=foo", "model.router='foo' is unknown; choose one of smoe, cosine"),
        (
            "model.router=cosine model.router.noise=1",
            "model.router.noise does not exist in CosineConfig, which model.router=... chose",
        ),
        ("model=switch-nano", "model is a group; set a part, such as model.vocab_size"),
        ("steps.x=3", "steps.x is unknown: steps is one value, set steps=..."),
        ("steps", "'steps' is no setting; write key=value, such as seed=1"),
        ("=3", "'=3' is no setting"),
        ("steps=1 steps=2", "steps is given twice, as 1 and 2; choose one"),
        ("steps=0", "steps=0; it must be a whole number of at least 1"),
        ("batch=4 split=3", "batch=4 streams do not split into 3 micro-batches"),
        ("min_lr=1", "min_lr=1.0 exceeds lr=0.001"),
        ("betas=0.9,1", "betas=(0.9, 1.0); both must lie in [0, 1)"),
        ("device=gpu", "device='gpu' is unknown; use auto, cpu, cuda, cuda:0, xpu or mps"),
        ("model.dim=50", "dim=50 does not split over heads=4"),
        ("eval_tokens=8", "eval_tokens=8 leaves no prediction for each of eval_batch=8 rows"),
        ("data.name=enwik8 data.limit=100", "give the limit to `acmoe data prepare`"),
    ],
)
def test_every_mistake_is_one_line_with_the_value_and_the_fix(pairs: str, message: str) -> None:
    with pytest.raises(UserError) as mistake:
        override_run(RUN, pairs.split(" "))
    assert message in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_every_listed_key_can_be_set() -> None:
    listed = keys(RUN)
    assert {"steps", "model.dim", "model.router", "model.router.bias", "data.name"} <= set(listed)
    assert "model" not in listed
    for key in listed:
        with pytest.raises(UserError, match="given twice"):
            override_run(RUN, (f"{key}=1", f"{key}=2"))

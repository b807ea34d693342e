"""The asynchronous trainer: the same gradient as the synchronous one on the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny import ADAPTER, save_tiny_model
from tiny_async import (
    GivenRolloutWorker,
    given_group,
    logprobs_of,
    make_async_trainer,
    make_loop,
    moved_policy,
    named,
    run_on_cpu,
)
from tiny_env import PROMPTS, G, difference, given_completion, logged, make_trainer, quiet

from hf_grpo_ext import AsyncGRPOExtConfig
from hf_grpo_ext.loss import METRIC_REDUCTIONS

pytestmark = [quiet, pytest.mark.slow]
DATASET = Dataset.from_dict({"prompt": PROMPTS})


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stale(tiny: str) -> Any:
    """The policy that sampled."""
    return moved_policy(tiny, 0.9)


def in_the_synchronous_trainer(model: str, folder: Path, sampler: Any, **args: Any) -> Any:
    score = logprobs_of(sampler)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        ids = [given_completion(prompt, row % G, 7) for row, prompt in enumerate(prompt_ids)]
        logprobs = [score(prompt, completion) for prompt, completion in zip(prompt_ids, ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}

    parts = {"rollout_func": rollout}
    trainer = make_trainer(model, folder, named, trainer=parts, scale_rewards="group", **args)
    return with_another_reference(trainer, model)


def in_the_asynchronous_trainer(model: str, folder: Path, sampler: Any, groups: int = 4, **args: Any) -> Any:
    config = AsyncGRPOExtConfig(use_cpu=True, bf16=False, adv_estimator=args.get("adv_estimator"))
    loop = make_loop([named], DATASET, adv_estimator=config.adv_estimator_config)
    order = [given_group(PROMPTS[i], i, logprobs=logprobs_of(sampler)) for i in range(groups)]
    trainer = make_async_trainer(model, folder, GivenRolloutWorker(loop, order), DATASET, **args)
    return with_another_reference(trainer, model)


def with_another_reference(trainer: Any, model: str) -> Any:
    """Trains. The policy has moved away from the reference, or there would be no KL in the first step."""
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(moved_policy(model, 0.8).state_dict())
    trainer.train()
    return trainer


TOKEN = {"token_level_loss": True}
LOSSES: dict[str, Any] = {
    "token": TOKEN,
    "sequence": {"token_level_loss": False},
    "gspo": {"name": "gspo"},
    "cispo": {"name": "cispo"},
    "dr_grpo": {"name": "dr_grpo"},
    "KL": TOKEN | {"reference_policy_kl_penalty": 1.0},
    "KL of the sampler": TOKEN | {"reference_policy_kl_penalty": 1.0, "use_on_policy_kl_approximation": True},
}
LOSSES |= {
    kind: TOKEN
    | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": 0.65,
        "truncated_importance_sampling_ratio": 1.05,
    }
    for kind in ("tis", "icepop", "seq-mask-tis")
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_the_gradient_is_that_of_the_synchronous_trainer(
    tiny: str, stale: Any, tmp_path: Path, estimator: str, loss: str
) -> None:
    """Rollouts of an older policy, in both trainers."""
    block = LOSSES[loss] | {"use_importance_sampling_correction": True}
    want = in_the_synchronous_trainer(tiny, tmp_path / "sync", stale, adv_estimator={"name": estimator}, loss_fn=block)
    got = in_the_asynchronous_trainer(tiny, tmp_path / "async", stale, adv_estimator=estimator, loss_fn=LOSSES[loss])
    assert want.watch.gradients[0].norm() > 1e-3
    assert difference(got.watch.gradients[0], want.watch.gradients[0]) < 1e-5
    metrics = [name for name in METRIC_REDUCTIONS if logged(want, name)]
    assert {"sampling_importance_ratio", "token_mult_prob_error", "num_valid_samples"} < set(metrics)
    assert {name: logged(got, name)[0] for name in metrics} == pytest.approx(
        {name: logged(want, name)[0] for name in metrics}, rel=1e-4
    )
    if "KL" in loss:
        assert logged(want, "kl")[0] > 0.01
    if "truncated_importance_sampling_type" in LOSSES[loss]:
        assert 0 < logged(want, "is_oob_ratio")[0] < 1


@pytest.mark.parametrize("initialisation", [True, "pissa"])
def test_the_reference_of_an_adapter_is_the_policy_as_it_starts(
    tiny: str, stale: Any, tmp_path: Path, initialisation: Any
) -> None:
    adapter = LoraConfig(**(ADAPTER | {"init_lora_weights": initialisation}))
    trainer = in_the_asynchronous_trainer(
        tiny,
        tmp_path,
        stale,
        groups=8,
        trainer={"peft_config": adapter},
        max_steps=2,
        learning_rate=0.1,
        loss_fn={"reference_policy_kl_penalty": 0.1},
    )
    first, second = logged(trainer, "kl")
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-3

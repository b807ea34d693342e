"""The asynchronous trainer: the same gradient as the synchronous one on the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import save_tiny_model
from tiny_async import (
    GivenRolloutWorker,
    given_group,
    logprobs_of,
    make_async_trainer,
    make_loop,
    named,
    run_on_cpu,
)
from tiny_env import PROMPTS, G, difference, given_completion, logged, quiet, trained
from transformers import AutoModelForCausalLM

from hf_grpo_ext import AsyncGRPOExtConfig

pytestmark = quiet
DATASET = Dataset.from_dict({"prompt": PROMPTS})


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The policy that sampled: other weights."""
    folder = save_tiny_model(tmp_path_factory.mktemp("stale"), seed=1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def in_the_synchronous_trainer(model: str, folder: Path, sampler: Any, **args: Any) -> Any:
    score = logprobs_of(sampler)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        ids = [given_completion(prompt, row % G, 7) for row, prompt in enumerate(prompt_ids)]
        logprobs = [score(prompt, completion) for prompt, completion in zip(prompt_ids, ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}

    return trained(model, folder, named, trainer={"rollout_func": rollout}, scale_rewards="group", **args)


def in_the_asynchronous_trainer(model: str, folder: Path, sampler: Any, groups: int = 4, **args: Any) -> Any:
    trainer_args = args.pop("trainer", {})
    config = AsyncGRPOExtConfig(use_cpu=True, bf16=False, adv_estimator=args.get("adv_estimator"))
    loop = make_loop([named], DATASET, adv_estimator=config.adv_estimator_config)
    order = [given_group(PROMPTS[i], i, logprobs=logprobs_of(sampler)) for i in range(groups)]
    trainer = make_async_trainer(model, folder, GivenRolloutWorker(loop, order), DATASET, trainer=trainer_args, **args)
    trainer.train()
    return trainer


TOKEN = {"token_level_loss": True}
LOSSES: dict[str, Any] = {
    "token": TOKEN,
    "sequence": {"token_level_loss": False},
    "gspo": {"name": "gspo"},
    "cispo": {"name": "cispo"},
    "icepop": TOKEN
    | {
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio_min": 0.5,
        "truncated_importance_sampling_ratio": 2.0,
    },
    "KL": TOKEN | {"reference_policy_kl_penalty": 0.1},
    "KL of the sampler": TOKEN | {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
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
    for metric in ("sampling_importance_ratio", "token_mult_prob_error", "num_valid_samples", "probs_ratio", "entropy"):
        assert logged(got, metric)[0] == pytest.approx(logged(want, metric)[0], rel=1e-4), metric

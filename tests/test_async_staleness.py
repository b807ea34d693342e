"""Rollouts that are two updates old train as fresh ones do, and without the correction they do not.

A policy of one number: the answers -1, 0, 1 have the logits -x, 0, x, and 0 is right. With learning rate `STEP` for x,

    x <- x + STEP * E[(r - b) (a - E a)],   near the optimum x = 0:   x <- x - STEP * 2/9 * x

A gradient that is not corrected has in the place of the last x the one of two updates ago, and such a recursion swings
wider and wider from STEP * 2/9 > 2 sin(pi / 10) = 0.62 on, where a fresh one does so from 2 on. Here it is 1.33.
"""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import make_tokenizer, save_tiny_model
from tiny_async import NoTransfer, make_async_trainer, make_loop, run_on_cpu
from tiny_env import make_trainer, quiet
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossFn

pytestmark = [quiet, pytest.mark.slow]
STEP, START, UPDATES, GROUP = 6.0, -1.5, 40, 64
PROMPT = "1 + 1 ="
PROMPT_IDS = make_tokenizer()(PROMPT)["input_ids"]
DATASET = Dataset.from_dict({"prompt": [PROMPT]})
ANSWERS = [10, 11, 12]  # tokens; the one in the middle is right
ESTIMATOR = {"name": "grpo", "normalize_rewards": False}
TRAINED = "model.norm.weight"


def right(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids == [ANSWERS[1]]) for ids in completion_ids]


def save_policy(folder: Path) -> tuple[str, float]:
    """A model of which the scale of the last norm alone makes x, and the learning rate of that scale.

    The last hidden state is u times the scale g, which starts at 1. Half of it makes x = START * sum(g u^2) / sum(u^2);
    the other half keeps the logit of every other token at -30.
    """
    path = save_tiny_model(folder, vocab_size=64)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        u = model.model(torch.tensor([PROMPT_IDS])).last_hidden_state[0, -1]
        first, second = u.clone(), u.clone()
        first[16:], second[:16] = 0, 0
        head = model.lm_head.weight
        head.copy_(-30 * second / second.square().sum())
        for answer, sign in zip(ANSWERS, (-1, 0, 1), strict=True):
            head[answer] = sign * START * first / first.square().sum()
        slope = START * first.square() / first.square().sum()  # of x, in g
    model.save_pretrained(path)
    return path, STEP / slope.square().sum().item()


def policy_of(model: Any) -> Tensor:
    """The probabilities of the answers."""
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPT_IDS])).logits[0, -1].softmax(-1)[ANSWERS]
    assert probabilities.sum() > 0.999
    return probabilities.double()


def draw(policy: Tensor, generator: torch.Generator) -> tuple[list[int], list[float]]:
    """The answers of a group, and their log-probabilities."""
    ranks = torch.multinomial(policy, GROUP, replacement=True, generator=generator)
    return [ANSWERS[rank] for rank in ranks], policy.log()[ranks].tolist()


def freeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name == TRAINED


class StaleEngine(NoTransfer):
    """Takes the weights, and answers with a group that the policy before the last update has drawn.

    The data loader asks for a batch one update before it trains, so that this is two updates ago by then.
    """

    def __init__(self, model: str, seed: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.loop = make_loop(
            [right], DATASET, adv_estimator=AdvEstimatorConfig.from_dict(ESTIMATOR), num_generations=GROUP
        )
        self.policies: list[Tensor] = []  # after each update
        self.drawn_by: list[int] = []  # of each group, the number of updates
        self.rollout_buffer, self.metrics_queue = self, queue.Queue[Any]()
        self.ready: list[Any] = []

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.model.load_state_dict(dict(iterator), strict=False)
        self.policies.append(policy_of(self.model))

    def get(self, timeout: float) -> Any:
        if not self.ready:
            self.drawn_by.append(max(0, len(self.policies) - 2))
            answers, logprobs = draw(self.policies[self.drawn_by[-1]], self.generator)
            self.ready = asyncio.run(self.loop._score_group(self.group(answers, logprobs)))
        return self.ready.pop()

    def group(self, answers: list[int], logprobs: list[float]) -> RolloutGroup:
        context = len(PROMPT_IDS)
        sequences = [
            [TrainingSequence([*PROMPT_IDS, answer], [0] * context + [1], [0.0] * context + [lp], "")]
            for answer, lp in zip(answers, logprobs, strict=True)
        ]
        return RolloutGroup(
            prompts=[PROMPT] * GROUP,
            reward_kwargs={},
            completions=[""] * GROUP,
            completions_ids=[[answer] for answer in answers],
            completions_sequences=sequences,
            tool_call_counts=[0] * GROUP,
            tool_failure_counts=[0] * GROUP,
            model_version=self.drawn_by[-1] + 1,  # the first weights have the number 1
            group_id=len(self.drawn_by),
            env_rewards=[None] * GROUP,
            rollout_rewards=[None] * GROUP,
        )

    def qsize(self) -> int:
        return len(self.ready)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class Uncorrected(ClippedPGLossFn):
    """The same loss on rollouts that are taken for fresh ones."""

    def __call__(self, logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        return super().__call__(logprobs, batch | {"generation_logprobs": logprobs.detach()}, **counts)


SHARED = {"per_device_train_batch_size": GROUP, "num_generations": GROUP, "max_steps": UPDATES, "logging_steps": 40}


def asynchronous(model: str, rate: float, folder: Path, seed: int, loss: type[ClippedPGLossFn]) -> list[Tensor]:
    engine = StaleEngine(model, seed)
    trainer = make_async_trainer(
        model,
        folder,
        engine,
        DATASET,
        trainer={"weight_transfer": engine},
        adv_estimator=ESTIMATOR,
        learning_rate=rate,
        **SHARED,
    )
    freeze(trainer.model)
    trainer.loss_fn = loss(trainer.args.loss_config)
    trainer.train()
    assert engine.drawn_by[:UPDATES] == [0, 0, *range(UPDATES - 2)]
    return engine.policies


def synchronous(model: str, rate: float, folder: Path, seed: int) -> list[Tensor]:
    generator, policies = torch.Generator().manual_seed(seed), []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        policies.append(policy_of(trainer.model))
        answers, logprobs = draw(policies[-1], generator)
        return {
            "prompt_ids": [PROMPT_IDS] * GROUP,
            "completion_ids": [[answer] for answer in answers],
            "logprobs": [[lp] for lp in logprobs],
        }

    fields = {"adv_estimator": ESTIMATOR, "learning_rate": rate, **SHARED}
    trainer = make_trainer(model, folder, right, dataset=DATASET, trainer={"rollout_func": rollout}, **fields)
    freeze(trainer.model)
    trainer.train()
    return policies


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_correction_makes_up_for_two_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    run_on_cpu(monkeypatch)
    model, rate = save_policy(tmp_path / "model")
    runs = {
        "fresh": synchronous(model, rate, tmp_path / "fresh", seed),
        "corrected": asynchronous(model, rate, tmp_path / "corrected", seed, ClippedPGLossFn),
        "uncorrected": asynchronous(model, rate, tmp_path / "uncorrected", seed, Uncorrected),
    }
    start = 1 / (1 + 2 * math.cosh(START))
    assert [policies[0][1].item() for policies in runs.values()] == pytest.approx([start] * 3, abs=1e-4)
    reward = {name: torch.stack(policies)[20:UPDATES, 1].mean().item() for name, policies in runs.items()}
    assert reward["fresh"] == pytest.approx(1 / 3, abs=0.01)
    assert reward["corrected"] == pytest.approx(reward["fresh"], abs=0.005)
    assert reward["uncorrected"] < reward["fresh"] - 0.04

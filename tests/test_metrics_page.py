"""`docs/metrics.md` has every metric that is logged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import save_tiny_model
from tiny_async import GivenRolloutWorker, given_group, make_async_trainer, make_loop, run_on_cpu
from tiny_env import PROMPTS, given_completion, padded, quiet, token_logprobs, trained

from hf_grpo_ext.loss import METRIC_REDUCTIONS
from hf_grpo_ext.trainer import TRL_METRIC_NAMES

pytestmark = quiet
PAGE = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
ON_THE_PAGE = set(re.findall(r"`([^`\n]+)`", PAGE))


def name_on_the_page(key: str, components: list[str]) -> str:
    """`rewards/right/mean` is explained as `rewards/<name>/mean`."""
    for name in components:
        key = re.sub(rf"^rewards/{name}(/|$)", r"rewards/<name>\1", key)
    return re.sub(r"^rewards/correlation/[^/]+/[^/]+$", "rewards/correlation/<a>/<b>", key)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
    ids = [given_completion(prompt, row % 4, 7) for row, prompt in enumerate(prompt_ids)]
    with torch.no_grad():
        logprobs = token_logprobs(trainer.model, padded(prompt_ids, ids))[0] - 0.1
    lists = [values[: len(row)].tolist() for values, row in zip(logprobs, ids, strict=True)]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": lists}


def score(completion_ids: list[list[float]], **_: Any) -> dict[str, list[int]]:
    return {
        "length": [float(len(ids)) for ids in completion_ids],
        "first": [float(ids[0] % 2) for ids in completion_ids],
    }


def test_every_metric_of_a_run_is_on_the_page(tmp_path: Path) -> None:
    trainer = trained(
        save_tiny_model(tmp_path / "model", vocab_size=64),
        tmp_path,
        score,
        trainer={"rollout_func": rollout},
        adv_estimator="gdpo",
        beta=0.1,
        entropy_coef=0.01,
        loss_fn={
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
        },
    )
    keys = {name_on_the_page(key, ["length", "first"]) for entry in trainer.state.log_history for key in entry}
    # The run is one in which everything is logged, or this test would look for little.
    assert {"kl", "token_mult_prob_error", "is_oob_ratio", "entropy_coef"} <= keys
    assert {"rewards/<name>/advantage_share", "rewards/correlation/<a>/<b>", "frac_rows_skipped"} <= keys
    assert keys <= ON_THE_PAGE, f"not on the page: {sorted(keys - ON_THE_PAGE)}"


def test_every_metric_of_an_asynchronous_run_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    silent = {PROMPTS[1]}

    def score_some(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> dict[str, list[float]]:
        return {
            name: [v * (p not in silent) for v, p in zip(column, prompts, strict=True)]
            for name, column in score(completion_ids).items()
        }

    loop = make_loop([score_some], dataset, drop_groups_without_signal=True)
    worker = GivenRolloutWorker(loop, [given_group(prompt, number) for number, prompt in enumerate(PROMPTS[:5])])
    trainer = make_async_trainer(
        save_tiny_model(tmp_path / "model"),
        tmp_path,
        worker,
        dataset,
        loss_fn={
            "reference_policy_kl_penalty": 0.1,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
        },
    )
    trainer.train()
    keys = {name_on_the_page(key, ["length", "first"]) for entry in trainer.state.log_history for key in entry}
    assert {"kl", "is_oob_ratio", "rewards/<name>", "rollout/dropped_groups_total", "frac_reward_zero_std"} <= keys
    # TRL's, but for the one that is ours.
    of_trl = {key for key in keys if key.split("/")[0] in ("perf", "batch", "sample", "rollout")}
    ours = keys - of_trl | {"rollout/dropped_groups_total"}
    assert ours <= ON_THE_PAGE, f"not on the page: {sorted(ours - ON_THE_PAGE)}"


@pytest.mark.parametrize("name", sorted({*METRIC_REDUCTIONS, *TRL_METRIC_NAMES.values()}))
def test_every_metric_of_the_loss_is_on_the_page(name: str) -> None:
    assert name in ON_THE_PAGE


def test_the_page_says_why_a_loss_near_0_is_right() -> None:
    assert "a loss near 0 is right" in PAGE
    assert "advantages of a group cancel" in PAGE

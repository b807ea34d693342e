"""`AsyncGRPOExtConfig`: the same blocks, the correction always on, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from tiny_env import quiet
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from hf_grpo_ext import AdvEstimatorConfig, AsyncGRPOExtConfig, AsyncGRPOExtTrainer, ClippedPGLossConfig, GRPOExtConfig
from hf_grpo_ext.explain import explain, warnings_of_experience
from hf_grpo_ext.objective import LOSS_FIELDS

pytestmark = quiet
CORRECTION = "use_importance_sampling_correction"


def config(**fields: Any) -> AsyncGRPOExtConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return AsyncGRPOExtConfig(**({"use_cpu": True, "bf16": False} | fields))


# What each field of AsyncGRPOConfig is to us; as in test_config.py.
MAPPED = {"epsilon", "epsilon_high"}
HONOURED = {
    # The reference policy is loaded as the policy is, and scored at its temperature.
    "model_init_kwargs", "temperature",
    "max_completion_length", "max_staleness", "num_generations", "router_aux_loss_coef",
    # Whether the engine samples from the softmax alone.
    "min_p", "repetition_penalty", "top_k", "top_p",
}  # fmt: skip
INHERITED = {
    "chat_template_kwargs", "dtype", "fork_threshold_tokens", "heartbeat_stale_after_s", "ignore_data_skip",
    "learning_rate", "log_completions", "logging_steps", "lr_scheduler_type", "max_inflight_tasks",
    "max_tool_calling_iterations", "num_completions_to_print", "queue_maxsize", "request_timeout", "token_budget",
    "trust_remote_code", "vllm_server_base_url", "vllm_server_timeout", "weight_sync_steps", "weight_sync_timeout",
}  # fmt: skip


def test_every_field_of_async_grpo_config_is_classified_once() -> None:
    own = {name for name in AsyncGRPOConfig.__annotations__ if not name.startswith("_")}
    classes = [MAPPED, HONOURED, INHERITED]
    known = set().union(*classes)
    assert sum(map(len, classes)) == len(known), "a field stands in two classes"
    assert not own - known, f"TRL has new fields; classify them here and in async_config.py: {sorted(own - known)}"
    assert not known - own, f"TRL has dropped fields: {sorted(known - own)}"
    assert own & set(LOSS_FIELDS) == MAPPED


def test_the_objective_is_that_of_the_synchronous_trainer() -> None:
    """But for the correction."""
    for blocks in (
        {"loss_fn": "dapo", "adv_estimator": "gdpo"},
        {"loss_fn": {"name": "gspo", "reference_policy_kl_penalty": 0.1}, "advantage_clip_low": -1.0},
        {"loss_fn": "dr_grpo", "adv_estimator": {"normalize_rewards": False}},
        {"loss_fn": {}, "epsilon": 0.3},
    ):
        ours, synchronous = config(**blocks), GRPOExtConfig(use_cpu=True, bf16=False, **blocks)
        assert ours.adv_estimator == synchronous.adv_estimator
        assert ours.loss_config == dataclasses.replace(synchronous.loss_config, **{CORRECTION: True})
        assert ours.loss_type == synchronous.loss_type


@pytest.mark.parametrize(
    "off",
    [
        {CORRECTION: False},
        {CORRECTION: 0},
        {CORRECTION: None},
        {"name": "dapo", CORRECTION: False},
        json.dumps({CORRECTION: False}),
        ClippedPGLossConfig(),
    ],
    ids=str,
)
def test_the_correction_cannot_be_switched_off(off: Any) -> None:
    with pytest.raises(ValueError, match=f"{CORRECTION}=(False|0|None) with the asynchronous trainer.*Leave it out"):
        config(loss_fn=off)


@pytest.mark.parametrize(
    "on",
    [
        None,
        "dapo",
        {},
        {CORRECTION: True},
        json.dumps({"ratio_clip_max": 0.3}),
        ClippedPGLossConfig(**{CORRECTION: True}),
    ],
    ids=str,
)
def test_the_correction_is_on(on: Any) -> None:
    assert config(loss_fn=on).loss_config.use_importance_sampling_correction is True


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"use_dynamic_sampling": True}, "use_dynamic_sampling=True.*Set drop_groups_without_signal=True"),
        (
            {"loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1}},
            "use_kl_in_reward=True with the asynchronous trainer.*no reference policy",
        ),
        ({"reward_timeout": 0.0}, "reward_timeout=0.0: it must be a positive number of seconds, or None"),
        ({"reward_timeout": float("nan")}, "reward_timeout=nan"),
        ({"loss_fn": {"ratio_clip_min": 0.1}, "epsilon": 0.3}, "ratio_clip_min=0.1.*epsilon=0.3"),
        ({"loss_fn": "gsp"}, "did you mean 'gspo'"),
        ({"reward_weights": ["much"]}, "reward_weights=\\['much'\\]"),
        (
            {"loss_fn": {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0}},
            "truncated_importance_sampling_ratio_min",
        ),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(**fields)


def test_the_config_of_another_trainer() -> None:
    with pytest.raises(TypeError, match="args is a AsyncGRPOConfig: AsyncGRPOExtTrainer needs an AsyncGRPOExtConfig"):
        AsyncGRPOExtTrainer("model", args=AsyncGRPOConfig(use_cpu=True, bf16=False))


def test_a_field_that_is_assigned_too_late_is_refused() -> None:
    late = config()
    late.epsilon = 0.5
    with pytest.raises(ValueError, match=r"epsilon was set to 0.5 after .* Pass it to AsyncGRPOExtConfig"):
        AsyncGRPOExtTrainer("model", args=late)


def test_it_is_read_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "use_cpu: true\nbf16: false\nadv_estimator:\n  name: gdpo\nloss_fn:\n  ratio_clip_max: 0.28\n"
        "drop_groups_without_signal: true\n"
    )
    arguments = ["--config", str(file), "--reward_timeout", "30", "--reward_weights", '{"format": 0.5}']
    (read,) = TrlParser(AsyncGRPOExtConfig).parse_args_and_config(arguments)
    assert read.adv_estimator == AdvEstimatorConfig(name="gdpo")
    assert (read.loss_config.ratio_clip_max, read.epsilon_high) == (0.28, 0.28)
    assert (read.drop_groups_without_signal, read.reward_timeout) == (True, 30.0)
    assert read.reward_weights == {"format": 0.5}


def test_it_travels() -> None:
    c = config(adv_estimator="gdpo", loss_fn="gspo")
    assert pickle.loads(pickle.dumps(c)).loss_fn == c.loss_fn  # training_args.bin
    assert json.loads(c.to_json_string())["loss_fn"][CORRECTION] is True


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "prev = sg(lp), the policy at the start of the optimizer step: rho is 1, and no clip bites"),
        ({}, f"loss_fn.{CORRECTION} = True  (asynchronous)"),
        ({}, "L <- exp(prev - gen) L"),
        ({}, "loss_fn.ratio_clip_min = 0.2  (TRL's epsilon, default)"),
        ({"max_staleness": 2}, "rollouts more than 2 updates old are left out"),
        ({"drop_groups_without_signal": True}, "groups whose rewards are all equal are dropped"),
        ({"reward_weights": [2.0]}, "reward weights [2.0]"),
        ({"adv_estimator": "gdpo"}, "over all rows of the optimizer step"),
        ({"adv_estimator": "reinforce_plus_plus"}, "over all tokens of the optimizer step"),
        (
            {"loss_fn": {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True}},
            "+ 0.1 * exp(lp - gen) (e^x - 1 - x), x = ref - lp",
        ),
    ],
)
def test_explain(fields: dict[str, Any], line: str) -> None:
    assert line in explain(config(**fields))


def test_advice_that_can_be_followed() -> None:
    (cut,) = warnings_of_experience(config(top_p=0.9))
    assert cut.startswith("top_p=0.9 with an importance correction")
    assert cut.endswith("repetition_penalty=1.0).")
    (dropout,) = warnings_of_experience(config(loss_fn={"reference_policy_kl_penalty": 0.1}))
    assert dropout.endswith("Set the dropouts of the model's config to 0.")
    assert warnings_of_experience(config()) == []

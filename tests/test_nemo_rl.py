"""A NeMo-RL file becomes a configuration with its objective, or an error."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import TrlParser

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossConfig, GRPOExtConfig, get_gdpo_reward_component_keys

NEMO: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": 32,
        "num_generations_per_prompt": 16,
        "max_rollout_turns": 1,
        "max_num_epochs": 2,
        "max_num_steps": 10,
        "normalize_rewards": True,
        "use_leave_one_out_baseline": False,
        "seed": 7,
        "val_period": 10,
        "overlong_filtering": True,
        "use_dynamic_sampling": False,
        "batch_multiplier": 1,
        "advantage_clip_low": -5.0,
        "reward_scaling": {"enabled": False, "source_min": 0.0},
        "async_grpo": {"enabled": False},
    },
    "loss_fn": {
        "reference_policy_kl_penalty": 0.02,
        "reference_policy_kl_type": "k1",
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.28,
        "ratio_clip_c": None,
        "truncated_importance_sampling_ratio": None,
        "token_level_loss": True,
    },
    "policy": {
        "model_name": "Qwen/Qwen2.5-1.5B",
        "train_global_batch_size": 256,
        "train_micro_batch_size": 4,
        "max_total_sequence_length": 512,
        "max_grad_norm": 0.5,
        "optimizer": {"kwargs": {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.98], "eps": 1e-9}},
        "generation": {
            "max_new_tokens": "${policy.max_total_sequence_length}",
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": None,
        },
    },
    "logger": {"wandb_enabled": False},
}


def changed(**blocks: dict[str, Any]) -> dict[str, Any]:
    content = copy.deepcopy(NEMO)
    for block, values in blocks.items():
        content[block] |= values
    return content


def read(source: Any, **overrides: Any) -> GRPOExtConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOExtConfig.from_nemo_rl(source, **({"use_cpu": True, "bf16": False} | overrides))


def test_what_has_a_counterpart_is_read() -> None:
    c = read(NEMO)
    assert c.adv_estimator == AdvEstimatorConfig(use_leave_one_out_baseline=False, advantage_clip_low=-5.0)
    assert c.loss_fn == ClippedPGLossConfig(
        reference_policy_kl_penalty=0.02, reference_policy_kl_type="k1", ratio_clip_max=0.28
    )
    assert (c.beta, c.epsilon, c.epsilon_high, c.scale_rewards) == (0.02, 0.2, 0.28, "group")
    assert (c.num_generations, c.generation_batch_size) == (16, 512)
    assert (c.per_device_train_batch_size, c.gradient_accumulation_steps) == (4, 64)
    assert c.steps_per_generation == 128
    assert c.max_steps == 20, "two updates for each of the 10 steps"
    assert (c.num_train_epochs, c.seed, c.mask_truncated_completions) == (2, 7, True)
    assert (c.learning_rate, c.weight_decay, c.adam_beta1, c.adam_beta2, c.adam_epsilon) == (
        5e-6,
        0.01,
        0.9,
        0.98,
        1e-9,
    )
    assert (c.max_grad_norm, c.temperature, c.top_p, c.max_completion_length) == (0.5, 0.8, 0.9, 512)


def test_what_has_none_is_listed_in_one_warning() -> None:
    with pytest.warns(UserWarning, match="no counterpart here: grpo.max_rollout_turns, grpo.val_period,") as caught:
        GRPOExtConfig.from_nemo_rl(NEMO, use_cpu=True, bf16=False)
    ours = [str(w.message) for w in caught if "counterpart" in str(w.message)]
    assert len(ours) == 1
    assert "logger" in ours[0]
    assert "policy.model_name" in ours[0]


@pytest.mark.parametrize(
    ("block", "values", "text"),
    [
        ("grpo", {"batch_multiplier": 2}, "batch_multiplier=2 without use_dynamic_sampling"),
        (
            "grpo",
            {"reward_scaling": {"enabled": True}},
            "grpo.reward_scaling.enabled=True .*would change the objective",
        ),
        ("grpo", {"reward_shaping": {"enabled": True}}, "grpo.reward_shaping.enabled=True"),
        ("grpo", {"async_grpo": {"enabled": True}}, "grpo.async_grpo.enabled=True"),
        ("grpo", {"adv_estimator": {"name": "gae"}}, "did you mean"),
        ("loss_fn", {"ratio_clip": 0.2}, "did you mean 'ratio_clip_c'"),
        ("loss_fn", {"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo=True with ratio_clip_c=3.0"),
        ("policy", {"train_global_batch_size": 100}, "do not divide"),
    ],
)
def test_what_would_change_the_objective_is_an_error(block: str, values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(changed(**{block: values}))


def test_the_estimator_block_wins_over_the_legacy_keys() -> None:
    block = {"name": "gdpo", "normalize_rewards": False, "minus_baseline": False}
    c = read(changed(grpo={"adv_estimator": block}))
    assert c.adv_estimator == AdvEstimatorConfig(
        name="gdpo", normalize_rewards=False, use_leave_one_out_baseline=False, advantage_clip_low=-5.0
    )


def test_a_truncation_ratio_without_a_type_is_tis() -> None:
    values = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
    assert read(changed(loss_fn=values)).loss_config.truncated_importance_sampling_type == "tis"


def test_overrides_win() -> None:
    c = read(
        NEMO,
        per_device_train_batch_size=8,
        learning_rate=1e-5,
        loss_fn={"ratio_clip_c": 3.0},
        adv_estimator={"name": "gdpo"},
    )
    assert (c.per_device_train_batch_size, c.gradient_accumulation_steps, c.learning_rate) == (8, 32, 1e-5)
    assert (c.loss_config.ratio_clip_c, c.loss_config.ratio_clip_max) == (3.0, 0.28)
    assert c.adv_estimator_config.name == "gdpo"
    assert c.adv_estimator_config.use_leave_one_out_baseline is False


def test_files_follow_their_parents(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(NEMO))
    child = {
        "defaults": "base.yaml",
        "grpo": {"adv_estimator": {"name": "gdpo"}},
        "logger": {"_override_": True, "wandb_enabled": True},
    }
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child))
    c = read(tmp_path / "child.yaml")
    assert (c.adv_estimator_config.name, c.num_generations) == ("gdpo", 16)
    with pytest.raises(ValueError, match="name other files: pass its path"):
        read(child)


def test_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "nemo.yaml"
    path.write_text(yaml.safe_dump(NEMO))
    arguments = ["--use_cpu", "--bf16", "false", "--nemo_rl_config", str(path), "--learning_rate", "1e-4"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (c,) = TrlParser(GRPOExtConfig).parse_args_and_config([*arguments, "--adv_estimator", "gdpo"])
    assert (c.learning_rate, c.num_generations, c.beta) == (1e-4, 16, 0.02)
    assert c.adv_estimator_config.name == "gdpo"


def test_a_file_of_another_kind() -> None:
    with pytest.raises(ValueError, match=re.escape("only ['model']: is this a NeMo-RL file?")):
        read({"model": {}})


def test_legacy_component_keys_come_in_their_order() -> None:
    batch = {f"reward{i}": i for i in (1, 2, 10)} | {"reward": 0, "rewards": 0, "reward/x": 0}
    assert get_gdpo_reward_component_keys(batch) == ["reward/x", "reward1", "reward2", "reward10"]

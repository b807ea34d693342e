"""`GRPOExtConfig`: one meaning for two sets of names, nothing ignored."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, TrlParser

from hf_grpo_ext import PRESETS, AdvEstimatorConfig, ClippedPGLossConfig, GRPOExtConfig


def config(**fields: Any) -> GRPOExtConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return GRPOExtConfig(**({"use_cpu": True, "bf16": False} | fields))


def loss(**fields: Any) -> ClippedPGLossConfig:
    return config(**fields).loss_config


# What each field of GRPOConfig is to us. "inherited": TRL's code uses it, ours does not care. "mapped": it says what a
# knob of ours says, see LOSS_FIELDS and ADVANTAGE_FIELDS. "honoured": our code reads it in the place of TRL's.
# "refused": a ValueError when it is set.
MAPPED = {
    "beta", "delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type",
    "multi_objective_aggregation", "scale_rewards", "use_bias_correction_kl",
}  # fmt: skip
HONOURED = {
    "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
    "gradient_accumulation_steps", "max_completion_length", "num_generations", "num_generations_eval",
    "num_iterations", "off_policy_mask_threshold", "reward_weights", "router_aux_loss_coef", "steps_per_generation",
    "top_entropy_quantile", "use_adaptive_entropy", "vllm_importance_sampling_correction",
}  # fmt: skip
REFUSED = {
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg",
    "vespo_lambda_pos",
}  # fmt: skip
INHERITED = {
    "cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "disable_dropout",
    "ds3_gather_for_generation", "generation_batch_size", "generation_kwargs", "learning_rate", "log_completions",
    "log_completions_hub_repo", "log_multimodal", "log_unique_prompts", "mask_truncated_completions",
    "max_tool_calling_iterations", "min_p", "model_init_kwargs", "num_completions_to_print", "pad_to_multiple_of",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "remove_unused_columns", "repetition_penalty",
    "shuffle_dataset", "sync_ref_model", "temperature", "top_k", "top_p", "transformers_continuous_batching_config",
    "trust_remote_code", "use_transformers_continuous_batching", "use_transformers_paged", "use_vllm",
    "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_mode",
    "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port", "vllm_server_timeout", "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
}  # fmt: skip


def test_every_field_of_grpo_config_is_classified_once() -> None:
    own = {name for name in GRPOConfig.__annotations__ if not name.startswith("_")} | {"gradient_accumulation_steps"}
    classes = [MAPPED, HONOURED, REFUSED, INHERITED]
    known = set().union(*classes)
    assert sum(map(len, classes)) == len(known), "a field stands in two classes"
    assert not own - known, f"TRL has new fields; classify them here and in config.py: {sorted(own - known)}"
    assert not known - own, f"TRL has dropped fields: {sorted(known - own)}"


def test_without_a_knob_the_objective_is_trls() -> None:
    c = config()
    assert c.adv_estimator_config == AdvEstimatorConfig(name="grpo")
    assert c.loss_config == ClippedPGLossConfig(
        reference_policy_kl_penalty=0.0,
        kl_importance_weight="policy_ratio",
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    stock = GRPOConfig(use_cpu=True, bf16=False)
    for name in MAPPED - {"epsilon_high"}:
        assert getattr(c, name) == getattr(stock, name), name
    assert c.epsilon_high == stock.epsilon  # TRL's None means the same


@pytest.mark.parametrize(
    ("fields", "knobs"),
    [
        ({"beta": 0.04}, {"reference_policy_kl_penalty": 0.04}),
        ({"epsilon": 0.1}, {"ratio_clip_min": 0.1, "ratio_clip_max": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.28}, {"ratio_clip_min": 0.1, "ratio_clip_max": 0.28}),
        ({"delta": 3.0}, {"ratio_clip_c": 3.0, "ratio_clip_max": 0.2}),
        # Below 1 + epsilon_high TRL's cap lowers the clip where A > 0 and does nothing where A < 0.
        ({"delta": 1.25, "epsilon_high": 0.5}, {"ratio_clip_c": 1.5, "ratio_clip_max": 0.25}),
        ({"loss_type": "grpo"}, {"token_level_loss": False}),
        ({"loss_type": "dr_grpo"}, {"token_level_loss": True}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 4.0},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"sequence_level_importance_ratios": True, "token_level_loss": False},
        ),
        ({"use_bias_correction_kl": False}, {"kl_importance_weight": "none"}),
    ],
)
def test_fields_of_trl_are_knobs(fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    resolved = dataclasses.asdict(loss(**fields))
    assert {name: resolved[name] for name in knobs} == knobs


@pytest.mark.parametrize(
    ("knobs", "fields"),
    [
        ({"reference_policy_kl_penalty": 0.04}, {"beta": 0.04}),
        ({"ratio_clip_min": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.2}),
        ({"ratio_clip_max": 0.28}, {"epsilon": 0.2, "epsilon_high": 0.28}),
        ({"ratio_clip_c": 3.0}, {"delta": 3.0}),
        ({"token_level_loss": False}, {"loss_type": "grpo"}),
        ({"use_cispo": True}, {"loss_type": "cispo", "epsilon_high": 1.2}),
        (
            {"token_level_loss": False, "sequence_level_importance_ratios": True},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
        ({"kl_importance_weight": "none"}, {"use_bias_correction_kl": False}),
    ],
)
def test_named_knobs_win_and_trl_agrees(knobs: dict[str, Any], fields: dict[str, Any]) -> None:
    c = config(loss_fn=knobs)
    assert {name: getattr(c, name) for name in fields} == fields
    # A config made of its own values means the same.
    again = {name: value for name, value in c.to_dict().items() if name != "generation_batch_size"}
    assert config(**again).loss_config == c.loss_config


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_fn": {"reference_policy_kl_penalty": 0.1}, "beta": 0.2}, "reference_policy_kl_penalty=0.1.*beta=0.2"),
        ({"loss_fn": {"ratio_clip_min": 0.1}, "epsilon": 0.3}, "ratio_clip_min=0.1.*epsilon=0.3"),
        ({"loss_fn": {"ratio_clip_max": 0.1}, "epsilon_high": 0.3}, "ratio_clip_max=0.1.*epsilon_high=0.3"),
        ({"loss_fn": {"ratio_clip_c": 2.0}, "delta": 3.0}, "ratio_clip_c=2.0.*delta=3.0"),
        ({"loss_fn": {"token_level_loss": True}, "loss_type": "grpo"}, "token_level_loss=True.*loss_type='grpo'"),
        ({"loss_fn": {"use_cispo": False}, "loss_type": "cispo"}, "use_cispo=False.*loss_type='cispo'"),
        ({"loss_fn": "dapo", "loss_type": "grpo"}, "token_level_loss=True.*loss_type='grpo'"),
        (
            {"adv_estimator": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
            "name='grpo'.*multi_objective_aggregation='normalize_then_sum'",
        ),
        (
            {"adv_estimator": {"normalize_rewards": True}, "scale_rewards": "none"},
            "normalize_rewards=True.*scale_rewards='none'",
        ),
        (
            {"adv_estimator": {"advantage_clip_low": -1.0}, "advantage_clip_low": -2.0},
            "advantage_clip_low=-1.0.*advantage_clip_low=-2.0",
        ),
    ],
)
def test_naming_both_with_different_values(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(**fields)


def test_the_same_value_twice_is_no_conflict() -> None:
    assert loss(loss_fn={"ratio_clip_min": 0.3}, epsilon=0.3).ratio_clip_min == 0.3


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_type": "sapo"}, "loss_type='sapo' cannot be expressed"),
        ({"loss_type": "luspo"}, "loss_type='luspo' cannot be expressed"),
        ({"loss_type": "vespo"}, "loss_type='vespo' cannot be expressed"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' cannot be honoured"),
        ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation='sum'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word'"),
        ({"importance_sampling_level": "sequence"}, "Set token_level_loss=False"),
        ({"loss_type": "cispo", "delta": 3.0}, "use_cispo=True with ratio_clip_c"),
        ({"delta": 0.9}, "ratio_clip_c=0.9: the dual clip must be > 1"),
        ({"loss_fn": {"use_kl_in_reward": True}, "adv_estimator": "gdpo", "beta": 0.1}, "which component would carry"),
        ({"loss_fn": {"use_kl_in_reward": True}}, "there is no KL to put into the reward"),
        ({"loss_fn": {"force_on_policy_ratio": True}, "num_iterations": 2}, "several updates a rollout"),
        ({"loss_fn": {"force_on_policy_ratio": True}, "steps_per_generation": 4}, "several updates a rollout"),
        ({"loss_fn": "gsp"}, "did you mean 'gspo'"),
        ({"loss_fn": {"name": "gspoo"}}, "did you mean 'gspo'"),
        ({"loss_fn": {"ratio_clip": 0.1}}, "did you mean 'ratio_clip_c'"),
        ({"adv_estimator": "gdp"}, "did you mean 'gdpo'"),
        ({"adv_estimator": {"name": "gdpo", "leave_one_out": True}}, "did you mean 'use_leave_one_out_baseline'"),
        ({"reward_weights": ["much"]}, "reward_weights=\\['much'\\]"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(**fields)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=7.0 would be ignored"):
        config(**{name: 7.0})


@pytest.mark.parametrize("value", [["gdpo"], 3, '["gdpo"]'])
def test_blocks_of_the_wrong_type(value: Any) -> None:
    for block in ("adv_estimator", "loss_fn"):
        with pytest.raises((TypeError, ValueError), match=f"{block}"):
            config(**{block: value})


def test_the_config_object_of_the_other_block() -> None:
    with pytest.raises(TypeError, match="loss_fn is a AdvEstimatorConfig"):
        config(loss_fn=AdvEstimatorConfig())
    with pytest.raises(TypeError, match="adv_estimator is a ClippedPGLossConfig"):
        config(adv_estimator=ClippedPGLossConfig())


def test_bnpo_says_what_it_does_instead() -> None:
    with pytest.warns(UserWarning, match="the tokens of the whole optimizer step"):
        assert config(loss_type="bnpo").loss_type == "bnpo"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_resolve_to_themselves(name: str) -> None:
    resolved = dataclasses.asdict(loss(loss_fn=name))
    assert {knob: resolved[knob] for knob in PRESETS[name]} == PRESETS[name]
    if name == "dr_grpo":
        assert config(loss_fn=name).loss_type == "dr_grpo"


def test_numbers_of_trl_replace_those_of_a_preset() -> None:
    assert loss(loss_fn="dapo", beta=0.04).reference_policy_kl_penalty == 0.04
    assert loss(loss_fn="dapo", epsilon_high=0.5).ratio_clip_max == 0.5
    assert loss(loss_fn={"name": "gspo", "ratio_clip_min": 1e-3}).ratio_clip_min == 1e-3


def test_estimators_by_every_road() -> None:
    want = AdvEstimatorConfig(name="gdpo", use_leave_one_out_baseline=False)
    block = {"name": "gdpo", "use_leave_one_out_baseline": False}
    for given in (block, json.dumps(block), want):
        c = config(adv_estimator=given)
        assert c.adv_estimator == want
        assert c.multi_objective_aggregation == "normalize_then_sum"
    assert config(adv_estimator="gdpo").adv_estimator_config.name == "gdpo"
    assert config(multi_objective_aggregation="normalize_then_sum").adv_estimator_config.name == "gdpo"
    assert config(scale_rewards=False).adv_estimator_config.normalize_rewards is False
    rpp = config(adv_estimator="reinforce_plus_plus")
    assert (rpp.scale_rewards, rpp.multi_objective_aggregation) == ("none", "sum_then_normalize")
    clipped = config(adv_estimator="gdpo", advantage_clip_low=-2.0, advantage_clip_high=3.0).adv_estimator_config
    assert (clipped.advantage_clip_low, clipped.advantage_clip_high) == (-2.0, 3.0)


def test_normalize_then_sum_always_normalises_as_trl_does() -> None:
    c = config(multi_objective_aggregation="normalize_then_sum", scale_rewards="none")
    assert c.adv_estimator_config.normalize_rewards is True
    assert config(adv_estimator="gdpo", scale_rewards="none").adv_estimator_config.normalize_rewards is False


def test_our_correction_stands_in_the_place_of_trls() -> None:
    assert config().vllm_importance_sampling_correction is True
    c = config(loss_fn={"use_importance_sampling_correction": True})
    assert c.vllm_importance_sampling_correction is False


def test_yaml_with_nested_blocks(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        """
use_cpu: true
bf16: false
adv_estimator:
  name: gdpo
  normalize_rewards: false
loss_fn:
  reference_policy_kl_penalty: 1e-2
  ratio_clip_max: 0.28
reward_weights:
  correctness: 2.0
"""
    )
    (c,) = TrlParser(GRPOExtConfig).parse_args_and_config(["--config", str(file), "--num_iterations", "2"])
    assert c.adv_estimator == AdvEstimatorConfig(name="gdpo", normalize_rewards=False)
    assert (c.loss_config.reference_policy_kl_penalty, c.beta, c.loss_config.ratio_clip_max) == (0.01, 0.01, 0.28)
    assert c.reward_weights == {"correctness": 2.0}
    assert c.num_iterations == 2


def test_command_line() -> None:
    def parse(*args: str) -> GRPOExtConfig:
        (c,) = TrlParser(GRPOExtConfig).parse_args_and_config(["--use_cpu", "--bf16", "false", *args])
        return c

    c = parse("--adv_estimator", "gdpo", "--loss_fn", '{"ratio_clip_c": 3}', "--reward_weights", "1.0", "2")
    assert (c.adv_estimator_config.name, c.loss_config.ratio_clip_c, c.reward_weights) == ("gdpo", 3, [1.0, 2.0])
    c = parse("--loss_fn", "gspo", "--reward_weights", '{"format": 0.5}', "--advantage_clip_high", "5")
    assert c.loss_config.sequence_level_importance_ratios
    assert c.reward_weights == {"format": 0.5}
    assert c.adv_estimator_config.advantage_clip_high == 5.0


def test_it_travels() -> None:
    c = config(adv_estimator="gdpo", loss_fn="gspo", reward_weights={"a": 1.0})
    assert pickle.loads(pickle.dumps(c)).loss_fn == c.loss_fn  # training_args.bin
    assert json.loads(c.to_json_string())["loss_fn"]["ratio_clip_max"] == 4e-4
    assert c.to_sanitized_dict()["adv_estimator"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("beta", 0.5), ("loss_type", "cispo"), ("num_iterations", 4), ("loss_fn", "gspo"), ("advantage_clip_high", 0.5)],
)
def test_a_field_that_is_assigned_too_late_is_refused(name: str, value: Any) -> None:
    c = config()
    c.check_unchanged()
    setattr(c, name, value)
    with pytest.raises(ValueError, match=f"{name} was set to {value!r} after the configuration was made"):
        c.check_unchanged()


@pytest.mark.parametrize("weights", [[float("nan")], {"a": float("inf")}, {"a": "x"}, {"a": None}, ["{a: 1}"]])
def test_weights_are_finite_numbers(weights: Any) -> None:
    with pytest.raises(ValueError, match="reward_weights="):
        config(reward_weights=weights)


def test_json_that_is_none_names_its_field() -> None:
    with pytest.raises(ValueError, match=r"loss_fn='{ratio_clip_max:0.28}' is no JSON object.*double quotes"):
        config(loss_fn="{ratio_clip_max:0.28}")


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_type": "cispo", "loss_fn": "dapo"},
        {"loss_type": "cispo", "loss_fn": "ppo"},
        {"importance_sampling_level": "sequence", "loss_fn": "grpo"},
        {"loss_type": "grpo", "loss_fn": "dapo"},
    ],
)
def test_what_a_preset_is_cannot_be_undone_by_a_field(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="They are the same setting: name one of them"):
        config(**fields)

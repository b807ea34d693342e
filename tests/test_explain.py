"""`explain` says what is trained, and warns of what has gone wrong for others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_grpo_ext import PRESETS, GRPOExtConfig
from hf_grpo_ext.explain import explain, main, method_name, named_preset, warnings_of_experience


def config(**fields: Any) -> GRPOExtConfig:
    return GRPOExtConfig(**({"use_cpu": True, "bf16": False} | fields))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_known_by_its_name_and_by_its_knobs(name: str) -> None:
    assert method_name(config(loss_fn=name)) == name
    twin = {"rloo": "reinforce", "reinforce_plus_plus": "ppo"}.get(name, name)  # the same loss but for the KL
    loss_type = {"loss_type": name} if name == "dr_grpo" else {}
    assert method_name(config(loss_fn=dict(PRESETS[name]), **loss_type)) == twin


def test_a_loss_of_ones_own_has_none() -> None:
    assert method_name(config(loss_fn={"ratio_clip_max": 0.37})) == "custom"
    changed = config(loss_fn={"name": "dapo", "ratio_clip_max": 0.37})
    assert (method_name(changed), named_preset(changed)) == ("custom", "dapo")
    assert named_preset(config()) is None


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"loss_fn": "dapo"}, "L = max(-A rho, -A clip(rho, 0.8, 1.28))"),
        ({"loss_fn": "gspo"}, "rho = exp(mean_t(lp - prev))"),
        ({"loss_fn": "cispo"}, "L = -sg(clip(rho, 0, 5)) A lp"),
        ({"loss_fn": "dual_clip"}, "L <- min(L, -3 A) where A < 0"),
        ({"loss_fn": "reinforce"}, "L = -A lp"),
        ({"loss_fn": {"force_on_policy_ratio": True}}, "rho = exp(lp - sg(lp))"),
        ({"loss_fn": "dr_grpo"}, "rows x max_completion_length"),
        ({"beta": 0.04}, "+ 0.04 * rho (e^x - 1 - x), x = ref - lp"),
        ({"loss_fn": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"}}, "x^2/2"),
        (
            {"loss_fn": {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis",
                         "truncated_importance_sampling_ratio": 2.0}},
            "L <- tis(exp(prev - gen), 0, 2) L",
        ),
        ({"adv_estimator": "gdpo"}, "A = whiten(sum_k w_k A_k)"),
        ({"adv_estimator": "reinforce_plus_plus"}, "over all tokens"),
        ({"entropy_coef": 0.1}, "entropy bonus, weight 0.1"),
        ({"top_entropy_quantile": 0.2}, "on the 20% tokens of highest entropy"),
        ({"mask_truncated_completions": True}, "truncated completions are left out"),
        ({"reward_weights": {"a": 2.0}}, "reward weights {'a': 2.0}"),
        ({"beta": 0.1, "loss_fn": {"use_kl_in_reward": True}}, "r <- r - sum over tokens of 0.1 * k3(prev, ref)"),
        (
            {"beta": 0.1, "loss_fn": {"use_kl_in_reward": True}, "adv_estimator": "reinforce_plus_plus"},
            "A <- A - 0.1 * k3(prev, ref), at each token",
        ),
        ({"advantage_clip_high": 5.0}, "A <- clamp(A, None, 5.0)"),
        ({"beta": 0.1}, "reference_policy_kl_penalty = 0.1  (TRL's beta)"),
        ({"loss_fn": {"ratio_clip_c": 2.0}}, "ratio_clip_c = 2.0  (named)"),
        ({"loss_fn": "dapo"}, "ratio_clip_max = 0.28  (preset 'dapo')"),
        ({}, "ratio_clip_min = 0.2  (TRL's epsilon, default)"),
    ],
)  # fmt: skip
def test_the_formula_has_its_numbers_and_their_sources(fields: dict[str, Any], line: str) -> None:
    assert line in explain(config(**fields))


CORRECTED = {"use_importance_sampling_correction": True}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_fn": {"name": "gspo", "ratio_clip_max": 0.2}}, "Sequence ratios with a clip of 0.2"),
        ({"loss_fn": {"use_cispo": True}}, "CISPO with a cap of 1.2"),
        ({"loss_fn": "rloo", "num_iterations": 4}, "nothing corrects for the policy"),
        ({"num_generations": 2}, "Leave-one-out with two generations"),
        ({"loss_fn": CORRECTED, "top_p": 0.9}, "renormalises its log-probabilities"),
        ({"loss_fn": CORRECTED, "top_k": 20}, "top_k=20 with an importance correction"),
        ({"loss_fn": CORRECTED, "min_p": 0.1, "repetition_penalty": 1.1}, "min_p=0.1, repetition_penalty=1.1 with"),
        ({"loss_fn": CORRECTED, "generation_kwargs": {"top_p": 0.9}}, "top_p=0.9 with an importance correction"),
        ({"loss_fn": CORRECTED, "generation_kwargs": {"temperature": 0.7}}, "temperature=0.7 with"),
        ({"use_vllm": True, "top_p": 0.9}, "top_p=0.9 with an importance correction"),
        ({"beta": 0.1}, "dropout"),
    ],
)
def test_warnings_of_experience(fields: dict[str, Any], text: str) -> None:
    assert any(text in warning for warning in warnings_of_experience(config(**fields)))
    assert text in explain(config(**fields))


def test_a_sound_configuration_has_no_warning() -> None:
    sound: list[dict[str, Any]] = [
        {},
        {"loss_fn": "gspo"},
        {"loss_fn": "cispo"},
        {"beta": 0.1, "disable_dropout": True},
        {"top_p": 0.9},  # nothing is corrected
        {"loss_fn": CORRECTED, "temperature": 0.7},  # which the trainer knows
        {"loss_fn": CORRECTED, "top_k": -1, "generation_kwargs": {"top_p": 1.0}},
    ]
    for fields in sound:
        assert warnings_of_experience(config(**fields)) == []
    assert warnings_of_experience(config(beta=0.1), has_dropout=False) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("use_cpu: true\nbf16: false\nadv_estimator: gdpo\n")
    main(["explain", "--config", str(file), "--loss_fn", "dapo"])
    printed = capsys.readouterr().out
    assert printed.startswith("Loss: dapo")
    assert "Advantage: gdpo" in printed
    with pytest.raises(SystemExit, match="usage: python -m hf_grpo_ext explain"):
        main([])


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "hf_grpo_ext"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "usage: python -m hf_grpo_ext explain" in done.stderr

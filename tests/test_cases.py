"""What goes wrong for people who do this job: a small input and the right value, each derived in its comment."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import NAN, advantages, loss_and_grad

from hf_grpo_ext import ClippedPGLossConfig
from hf_grpo_ext.diagnostics import MetricWindow
from hf_grpo_ext.importance import truncate_weights


def close(actual: torch.Tensor, expected: list, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=tolerance)


def test_01_the_odd_row_is_undivided() -> None:
    # Its peers [0, 0, 0] have std 0. A row of 0 has peers [1, 0, 0]: mean 1/3, std .57735, so -(1/3) / .57735.
    close(advantages("grpo", [1, 0, 0, 0]), [1, -0.57735, -0.57735, -0.57735])


def test_02_float32_leaves_no_residue() -> None:
    odd = advantages("grpo", [1] + [0.15] * 7, dtype=torch.float32)[0]
    assert odd.item() == pytest.approx(0.85, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_02_totals_that_are_equal_but_for_rounding(dtype: torch.dtype) -> None:
    # The peers of the first row have .3 + .4 and .7 + 0, of the second .1 + .2 and .3 + 0.
    for x, y in ((0.3, 0.4), (0.1, 0.2)):
        a = advantages("grpo", {"a": [1, x, x + y], "b": [0, y, 0]}, dtype=dtype)
        assert a[0].item() == pytest.approx(1 - (x + y), abs=1e-6)
        equal = {"a": [x + y, x, x + y], "b": [0, y, 0]}
        assert advantages("grpo", equal, dtype=dtype).tolist() == [0.0] * 3
        assert advantages("reinforce_plus_plus", equal, dtype=dtype, mask=torch.ones(3, 2)).abs().max() == 0


def test_03_the_residue_does_not_hide_the_other_component() -> None:
    # Undivided, the odd row of r1 has 0.95; r2 has +-0.5 / 0.52. A residue would give r1 10^4 and r2 nothing.
    components = {"r1": [1] + [0.05] * 11, "r2": [0, 1] * 6}
    a = advantages("gdpo", components, dtype=torch.float32)
    assert (a[3] - a[2]).item() > 0.5  # rows 2 and 3 differ in r2 alone


def test_04_equal_rewards_are_no_signal() -> None:
    a = advantages("grpo", [0.45] * 3, dtype=torch.float32, use_leave_one_out_baseline=False)
    assert a.tolist() == [0.0, 0.0, 0.0]


def test_05_groups_are_rollout_groups_not_prompts() -> None:
    a = advantages("grpo", [0] * 16 + [1] * 16, group_ids=[0] * 16 + [1] * 16)
    assert a.tolist() == [0.0] * 32


def test_06_equal_totals_with_unequal_components_have_signal() -> None:
    rewards = {"a": [1, 0, 0, 0], "b": [0, 1, 1, 0], "c": [0, 0, 0, 1]}
    assert advantages("gdpo", rewards).abs().max() > 0.1
    assert advantages("grpo", rewards).tolist() == [0.0] * 4


def test_07_a_missing_value_is_absent_for_that_row_alone() -> None:
    a = advantages("gdpo", {"x": [None, 1, 0, 1, 0, 1, 0, 1], "y": [1, 0, 0, 1, 1, 0, 1, 0]})
    assert a.isfinite().all()
    assert a[0] != 0  # y still speaks for row 0
    # A row that nothing scores does not vote: the others have the baseline of [1, 0, 1].
    lone = advantages("grpo", [None, 1, 0, 1], use_leave_one_out_baseline=False, normalize_rewards=False)
    close(lone, [0, 1 / 3, -2 / 3, 1 / 3])


def test_08_a_batch_of_one_row() -> None:
    assert advantages("gdpo", {"x": [1], "y": [0]}).tolist() == [0.0]
    assert advantages("grpo", [1]).tolist() == [0.0]


def test_09_reinforce_plus_plus_whitens_over_tokens() -> None:
    # 2 tokens of 1 and 8 of 0: mean .2, variance .16, so (1 - .2) / .4 = 2 and (0 - .2) / .4 = -.5.
    mask = torch.zeros(2, 8)
    mask[0, :2] = 1
    mask[1] = 1
    a = advantages("reinforce_plus_plus", [1, 0], group_ids=[0, 1], mask=mask, minus_baseline=False)
    close(a[0, :2], [2, 2])
    close(a[1], [-0.5] * 8)


def test_10_token_advantages_do_not_share_memory() -> None:
    a = advantages("reinforce_plus_plus", [1, 0], mask=torch.ones(2, 4))
    before = a[0, 0].item()
    a[0, 3] = 99
    assert a[0, 0].item() == before


def test_11_weights_go_by_name_and_scale_together() -> None:
    rewards = {"b": [1, 0, 0, 1], "a": [0, 0.5, 1, 1]}
    weighted = advantages("grpo", rewards, extras={"reward_weights": {"b": 2, "a": 1}}, normalize_rewards=False)
    totals = [2.0, 0.5, 1.0, 3.0]
    close(weighted, [t - (sum(totals) - t) / 3 for t in totals])
    one = advantages("gdpo", rewards, extras={"reward_weights": {"b": 2, "a": 1}})
    ten = advantages("gdpo", rewards, extras={"reward_weights": {"a": 10, "b": 20}})
    torch.testing.assert_close(one, ten, rtol=1e-12, atol=1e-12)


def test_12_gdpo_is_not_grpo_of_the_sum() -> None:
    # x = [1,0,1,1]: mean .75, std .5 -> [.5,-1.5,.5,.5]. y = [0,1,1,0]: mean .5, std .57735 -> -+.866.
    # Sums [-.366,-.634,1.366,-.366] have mean 0 and are then divided by their own std.
    rewards = {"x": [1, 0, 1, 1], "y": [0, 1, 1, 0]}
    unwhitened = torch.tensor([-0.366, -0.634, 1.366, -0.366], dtype=torch.float64)
    a = advantages("gdpo", rewards, use_leave_one_out_baseline=False)
    torch.testing.assert_close(a * unwhitened.std(), unwhitened, rtol=0, atol=1e-3)
    # The totals [1, 1, 2, 1] have mean 1.25 and std .5.
    plain = advantages("grpo", rewards, use_leave_one_out_baseline=False)
    close(plain, [-0.5, -0.5, 1.5, -0.5])
    undivided = advantages("grpo", rewards, use_leave_one_out_baseline=False, normalize_rewards=False)
    close(undivided, [-0.25, -0.25, 0.75, -0.25])


def test_13_gdpo_tells_apart_what_grpo_cannot() -> None:
    # Sums -+1 and -+2 over four rows: std sqrt(10/3) = 1.8257.
    a = advantages("gdpo", {"x": [0, 1, 0, 1], "y": [0, 0, 0, 1]}, group_ids=[0, 0, 1, 1])
    close(a, [-0.5477, 0.5477, -1.0954, 1.0954], 1e-4)


@pytest.mark.parametrize(("advantage", "expected"), [(-1.0, 3.0), (1.0, -1.2)])
def test_14_dual_clip_bounds_negative_advantages_alone(advantage: float, expected: float) -> None:
    loss, _, _ = loss_and_grad([[math.log(5)]], [[advantage]], batch={"prev_logprobs": [[0.0]]}, ratio_clip_c=3.0)
    assert loss == pytest.approx(expected)
    with pytest.raises(ValueError, match="ratio_clip_c=1.0: the dual clip must be > 1"):
        ClippedPGLossConfig(ratio_clip_c=1.0)


def test_15_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    _, grad, _ = loss_and_grad([[math.log(1.5)]], [[1.0]], batch={"prev_logprobs": [[0.0]]}, use_cispo=True)
    assert grad.item() == pytest.approx(-1.2)  # the clipped weight times the gradient of lp
    with pytest.raises(ValueError, match="use_cispo=True with ratio_clip_c=3.0"):
        ClippedPGLossConfig(use_cispo=True, ratio_clip_c=3.0)


def test_16_gspo_rows_weigh_the_same() -> None:
    mask = torch.zeros(2, 20)
    mask[0, :2] = 1
    mask[1] = 1
    knobs = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    _, grad, _ = loss_and_grad(torch.full((2, 20), -1.0), [[1.0], [1.0]], mask=mask, **knobs)
    close(grad.sum(-1), [-0.5, -0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_17_a_masked_log_ratio_of_200(dtype: torch.dtype) -> None:
    loss, grad, _ = loss_and_grad(
        [[-1.0, -1.0]],
        [[1.0]],
        mask=[[1, 0]],
        dtype=dtype,
        batch={"prev_logprobs": [[-1.0, -201.0]], "reference_policy_logprobs": [[-1.0, 199.0]]},
        reference_policy_kl_penalty=0.1,
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    assert loss == pytest.approx(-1.0)
    assert grad.tolist() == [[-1.0, 0.0]]


def test_18_k1_carries_the_score_function_term() -> None:
    # KL = v (lp - ref) with v = exp(lp - sg(lp)): gradient 1 + (lp - ref) = 1 + .5 and 1 + (-1).
    _, grad, _ = loss_and_grad(
        [[-1.0, -2.0]],
        [[0.0]],
        toks=1,
        batch={"reference_policy_logprobs": [[-1.5, -1.0]]},
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type="k1",
    )
    close(grad, [[1.5, 0.0]])


def test_19_the_gradient_of_k1_knows_the_reference() -> None:
    grads = [
        loss_and_grad(
            [[-1.0, -2.0]],
            [[0.0]],
            batch={"reference_policy_logprobs": [[ref, ref]]},
            reference_policy_kl_penalty=1.0,
            reference_policy_kl_type="k1",
        )[1]
        for ref in (-1.5, -2.5)
    ]
    assert (grads[0] - grads[1]).abs().min() > 0.1


@pytest.mark.parametrize("key", ["logprobs", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"])
def test_20_a_nan_on_a_masked_position_changes_nothing(key: str) -> None:
    def run(hole: float) -> tuple:
        tensors = {
            "logprobs": [[-1.0, -2.0, -3.0]],
            "prev_logprobs": [[-1.1, -1.9, -3.0]],
            "generation_logprobs": [[-1.2, -1.8, -3.0]],
            "reference_policy_logprobs": [[-0.9, -2.2, -3.0]],
        }
        tensors[key][0][2] = hole
        lp = tensors.pop("logprobs")
        knobs = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
        return loss_and_grad(lp, [[1.0]], mask=[[1, 1, 0]], batch=tensors, **knobs)

    (loss, grad, metrics), (nan_loss, nan_grad, nan_metrics) = run(-3.0), run(NAN)
    assert nan_loss == loss
    assert nan_grad.tolist() == grad.tolist()
    assert {k: v.item() for k, v in nan_metrics.items()} == {k: v.item() for k, v in metrics.items()}


def test_21_icepop_in_the_sequence_level_loss_divides_by_all_tokens() -> None:
    prev = [0.1, -1.5, 0.8, -10.0, 0.3]
    knobs = {
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 2.0,
        "truncated_importance_sampling_ratio_min": 0.5,
    }
    # exp(.8) = 2.23 is above 2, exp(-1.5) and exp(-10) are below .5.
    loss, _, metrics = loss_and_grad(
        [prev], [[1.0]], batch={"prev_logprobs": [prev], "generation_logprobs": [[0.0] * 5]}, **knobs
    )
    assert metrics["is_oob_ratio"].item() == pytest.approx(3 / 5)
    assert loss == pytest.approx(-(math.exp(0.1) + math.exp(0.3)) / 5)


def test_22_two_filters_that_look_alike() -> None:
    errors = torch.tensor([[0.5, -0.5]])
    mask = torch.ones(1, 2)
    _, out = truncate_weights(errors.exp(), errors, mask, kind="seq-mask-tis", low=0.67, high=1.5)
    assert not out.any()  # geometric mean of the ratio: exp(0) = 1
    _, _, metrics = loss_and_grad([[0.5, -0.5]], [[1.0]], batch={"generation_logprobs": [[0.0, 0.0]]})
    assert metrics["token_mult_prob_error"].item() == pytest.approx(1.6487, abs=1e-4)  # exp(.5): over 1.5


def test_23_a_misspelt_knob_names_the_nearest() -> None:
    from hf_grpo_ext import GRPOExtConfig  # here, since it loads TRL, which no other test of this file needs

    with pytest.raises(ValueError, match="did you mean 'ratio_clip_max'"):
        GRPOExtConfig(use_cpu=True, loss_fn={"ratio_clip_maxx": 0.28})
    with pytest.raises(ValueError, match="did you mean 'normalize_rewards'"):
        GRPOExtConfig(use_cpu=True, adv_estimator={"normalise_rewards": True})


def test_28_metric_means_over_micro_batches_of_different_size() -> None:
    window = MetricWindow()
    window.add({"x": torch.tensor(3 / 16)}, {"x": "sum"})
    window.add({"x": torch.tensor(3 / 16)}, {"x": "sum"})
    assert window.flush(gather=lambda values: values) == {"x": 0.375}

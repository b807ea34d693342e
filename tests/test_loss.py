"""The loss against itself: special cases equal general ones, masks equal removal, parts add up, gradients are exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import loss_and_grad
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_grpo_ext import PRESETS, ClippedPGLossConfig, ClippedPGLossFn
from hf_grpo_ext.loss import ENGINE_METRICS, METRIC_REDUCTIONS
from hf_grpo_ext.loss_config import TRUNCATION_TYPES

ROWS, TOKENS = 4, 6
EXACT = {"rtol": 1e-12, "atol": 1e-14}

CONFIGS: dict[str, dict[str, Any]] = {
    **PRESETS,
    "kl_k1_sequence": {"token_level_loss": False, "reference_policy_kl_penalty": 0.2, "reference_policy_kl_type": "k1"},
    "kl_policy_ratio": {"reference_policy_kl_penalty": 0.2, "kl_importance_weight": "policy_ratio"},
    "kl_bare": {"reference_policy_kl_penalty": 0.2, "kl_importance_weight": "none"},
    "kl_on_policy": {"reference_policy_kl_penalty": 0.2, "use_on_policy_kl_approximation": True},
    "on_policy": {"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.1},
    "correction": {"use_importance_sampling_correction": True},
    **{
        kind: {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": 1.2,
            "truncated_importance_sampling_ratio_min": 0.8,
        }
        for kind in TRUNCATION_TYPES
    },
    "gspo_tis": {
        **PRESETS["gspo"],
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.5,
    },
}
every_config = pytest.mark.parametrize("knobs", CONFIGS.values(), ids=CONFIGS.keys())


def rollouts(seed: int = 0, dtype: torch.dtype = torch.float64, token_advantages: bool = False) -> dict[str, Tensor]:
    """A batch with padding, a hole in one row, and policies that differ by a few tenths of a nat."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    prev = -normal(ROWS, TOKENS).abs() - 0.1
    mask = torch.ones(ROWS, TOKENS)
    mask[1, 4:] = 0
    mask[2, 1:] = 0
    mask[3, 2:4] = 0
    batch = {
        "logprobs": prev + 0.3 * normal(ROWS, TOKENS),
        "prev_logprobs": prev,
        "generation_logprobs": prev + 0.2 * normal(ROWS, TOKENS),
        "reference_policy_logprobs": prev + 0.4 * normal(ROWS, TOKENS),
        "advantages": normal(ROWS, TOKENS if token_advantages else 1),
    }
    return {key: value.to(dtype) for key, value in batch.items()} | {
        "token_mask": mask,
        "sample_mask": torch.ones(ROWS),
    }


def run(
    batch: dict[str, Tensor], counts: tuple[float, float] | None = None, **knobs: Any
) -> tuple[Tensor, Tensor, dict]:
    batch = dict(batch)
    logprobs = batch.pop("logprobs").clone().requires_grad_()
    valid = batch["token_mask"].bool() & batch["sample_mask"].bool()[:, None]
    toks, seqs = counts or (valid.sum().item(), batch["sample_mask"].sum().item())
    loss, metrics = ClippedPGLossFn(ClippedPGLossConfig(**knobs))(
        logprobs, batch, global_valid_toks=toks, global_valid_seqs=seqs
    )
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def rows(batch: dict[str, Tensor], keep: list[int]) -> dict[str, Tensor]:
    return {key: value[keep] for key, value in batch.items()}


@every_config
def test_masked_rows_equal_removed_rows(knobs: dict[str, Any]) -> None:
    batch = rollouts()
    batch["sample_mask"][1] = 0
    loss, grad, metrics = run(batch, **knobs)
    less, less_grad, less_metrics = run(rows(rollouts(), [0, 2, 3]), **knobs)
    torch.testing.assert_close(loss, less, **EXACT)
    torch.testing.assert_close(grad[[0, 2, 3]], less_grad, **EXACT)
    assert grad[1].abs().max() == 0
    for name, value in less_metrics.items():
        torch.testing.assert_close(metrics[name], value, **EXACT, msg=name)


@every_config
def test_masked_tokens_equal_removed_tokens(knobs: dict[str, Any]) -> None:
    batch = rollouts(token_advantages=True)
    batch["token_mask"] = torch.ones(ROWS, TOKENS)
    batch["token_mask"][:, 2] = 0
    loss, grad, _ = run(batch, **knobs)
    kept = [0, 1, 3, 4, 5]
    shorter = {key: value[:, kept] if value.dim() == 2 else value for key, value in batch.items()}
    less, less_grad, _ = run(shorter, **knobs)
    torch.testing.assert_close(loss, less, **EXACT)
    torch.testing.assert_close(grad[:, kept], less_grad, **EXACT)


@every_config
@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[3], [0, 1, 2]], [[0], [1], [2], [3]]])
def test_micro_batches_add_up_to_the_whole(knobs: dict[str, Any], split: list[list[int]]) -> None:
    batch = rollouts(1)
    counts = (batch["token_mask"].sum().item(), float(ROWS))
    loss, grad, metrics = run(batch, counts, **knobs)
    parts = [run(rows(batch, keep), counts, **knobs) for keep in split]
    torch.testing.assert_close(sum(part[0] for part in parts), loss, **EXACT)
    for keep, part in zip(split, parts, strict=True):
        torch.testing.assert_close(part[1], grad[keep], **EXACT)
    reduce = {"sum": sum, "min": min, "max": max}
    for name, value in metrics.items():
        combined = reduce[METRIC_REDUCTIONS[name]]([part[2][name] for part in parts])
        torch.testing.assert_close(combined, value, **EXACT, msg=name)


# A stop-gradient is part of CISPO, of the forced ratio and of the KL weight: their gradient is not that of the value.
DIFFERENTIABLE = [
    name
    for name, knobs in CONFIGS.items()
    if not knobs.get("use_cispo")
    and not knobs.get("force_on_policy_ratio")
    and (
        knobs.get("reference_policy_kl_penalty", 0.01) == 0
        or knobs.get("kl_importance_weight") in ("none", "policy_ratio")
    )
]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_by_finite_differences(name: str) -> None:
    batch = rollouts(2)
    logprobs = batch.pop("logprobs").requires_grad_()
    fn = ClippedPGLossFn(ClippedPGLossConfig(**CONFIGS[name]))

    def loss(lp: Tensor) -> Tensor:
        return fn(lp, batch, global_valid_toks=17, global_valid_seqs=4)[0]

    assert torch.autograd.gradcheck(loss, (logprobs,), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_gradient_of_the_kl_by_hand(kl_type: str) -> None:
    """d(v k)/dlp = k + dk/dlp at v = 1, with x = ref - lp: k1 -> lp - ref + 1, and so on."""
    batch = rollouts(3)
    batch["advantages"] = torch.zeros(ROWS, 1)
    _, grad, _ = run(batch, reference_policy_kl_penalty=1.0, reference_policy_kl_type=kl_type)
    x = batch["reference_policy_logprobs"] - batch["logprobs"]
    by_hand = {"k1": -x + 1, "k2": x**2 / 2 - x, "k3": (x.exp() - 1 - x) + (1 - x.exp())}[kl_type]
    torch.testing.assert_close(grad, by_hand * batch["token_mask"] / batch["token_mask"].sum(), **EXACT)


def test_kl_gradient_estimates_the_gradient_of_the_kl() -> None:
    """Over a whole categorical distribution the expectation of each estimator's gradient is the gradient of the KL."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)[0]
    for kl_type in ("k1", "k3"):
        lp = torch.log_softmax(logits, -1)
        fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kl_type))
        estimate = torch.zeros(3, dtype=torch.float64)
        for token in range(3):  # expectation over tokens drawn from the policy
            batch = {
                "advantages": torch.zeros(1, 1),
                "token_mask": torch.ones(1, 1),
                "sample_mask": torch.ones(1),
                "reference_policy_logprobs": reference[token].view(1, 1),
            }
            loss, _ = fn(lp[token].view(1, 1), batch, global_valid_toks=1, global_valid_seqs=1)
            gradient = torch.autograd.grad(loss, logits, retain_graph=True)[0]
            estimate += policy[token].exp().detach() * gradient
        torch.testing.assert_close(estimate, exact, rtol=1e-10, atol=1e-12)


def test_dual_clip_at_infinity_is_no_dual_clip() -> None:
    batch = rollouts(4)
    for a, b in zip(run(batch, ratio_clip_c=math.inf)[:2], run(batch)[:2], strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_cispo_inside_the_range_has_the_unclipped_gradient() -> None:
    batch = rollouts(5)
    wide = {"ratio_clip_min": 1.0, "ratio_clip_max": 100.0}
    torch.testing.assert_close(run(batch, use_cispo=True, **wide)[1], run(batch, **wide)[1], **EXACT)


def test_gspo_on_single_tokens_is_the_sequence_level_ppo() -> None:
    batch = {key: value[:, :1] if value.dim() == 2 else value for key, value in rollouts(6).items()}
    one = run(batch, token_level_loss=False, sequence_level_importance_ratios=True)
    two = run(batch, token_level_loss=False)
    for a, b in zip(one[:2], two[:2], strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_on_policy_every_method_has_the_gradient_of_reinforce() -> None:
    batch = rollouts(7)
    batch["prev_logprobs"] = batch["logprobs"].clone()
    reinforce = run(batch, **PRESETS["reinforce"])[1]
    for name in ("ppo", "dapo", "cispo", "dual_clip"):
        torch.testing.assert_close(run(batch, **PRESETS[name])[1], reinforce, **EXACT)
    forced = run(batch, force_on_policy_ratio=True, reference_policy_kl_penalty=0.0)[1]
    torch.testing.assert_close(forced, reinforce, **EXACT)


def test_absent_prev_logprobs_mean_on_policy() -> None:
    batch = rollouts(8)
    on_policy = dict(batch, prev_logprobs=batch["logprobs"])
    absent = {key: value for key, value in batch.items() if key != "prev_logprobs"}
    for a, b in zip(run(on_policy)[:2], run(absent)[:2], strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_policy_weights_multiply_the_policy_term_alone() -> None:
    batch = rollouts(9)
    knobs = {"reference_policy_kl_penalty": 0.3}
    weights = torch.rand(ROWS, TOKENS, dtype=torch.float64)
    policy = run(batch, reference_policy_kl_penalty=0.0)[1]
    kl = run(batch, **knobs)[1] - policy
    torch.testing.assert_close(run(batch | {"policy_weights": weights}, **knobs)[1], weights * policy + kl, **EXACT)
    zero = run(batch | {"policy_weights": torch.zeros(ROWS, 1)}, **knobs)[1]
    torch.testing.assert_close(zero, kl, rtol=1e-10, atol=1e-14)


@every_config
def test_nothing_valid_is_exactly_zero_and_attached(knobs: dict[str, Any]) -> None:
    batch = rollouts(10)
    batch["sample_mask"] = torch.zeros(ROWS)
    loss, grad, _ = run(batch, (0, 0), **knobs)
    assert loss.item() == 0
    assert grad.abs().max() == 0


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_near_float64(knobs: dict[str, Any], dtype: torch.dtype) -> None:
    exact = rollouts(11)
    coarse = {key: value.to(dtype) if value.dtype == torch.float64 else value for key, value in exact.items()}
    # The same numbers in both, so that only the arithmetic differs: half precision is computed in float32.
    rounded = {key: value.double() for key, value in coarse.items()}
    loss, grad, _ = run(coarse, **knobs)
    want, want_grad, _ = run(rounded, **knobs)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(grad.double(), want_grad, rtol=2e-2 if dtype == torch.bfloat16 else 2e-5, atol=2e-6)


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key", ["logprobs", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"])
def test_extreme_logprobs_give_finite_results(knobs: dict[str, Any], dtype: torch.dtype, key: str) -> None:
    batch = rollouts(12, dtype)
    batch[key] = torch.full_like(batch[key], -1e4)
    batch["advantages"] = batch["advantages"] * 1e3
    loss, grad, _ = run(batch, **knobs)
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_metrics_are_declared_detached_and_on_the_device() -> None:
    _, _, metrics = run(rollouts(13), **CONFIGS["tis"])
    assert set(metrics) == set(METRIC_REDUCTIONS)
    assert set(ENGINE_METRICS) < set(metrics)
    for value in metrics.values():
        assert not value.requires_grad
        assert value.dim() == 0


def test_clip_fractions_count_where_the_clip_stops_the_gradient() -> None:
    ratios = torch.tensor([[0.5, 1.0, 2.0, 2.0]], dtype=torch.float64).log()
    for advantage, low, high in ((1.0, 0.0, 0.5), (-1.0, 0.25, 0.0)):
        _, grad, metrics = loss_and_grad(ratios, [[advantage]], batch={"prev_logprobs": [[0.0] * 4]})
        assert metrics["clip_fraction_low"].item() == low
        assert metrics["clip_fraction_high"].item() == high
        assert (grad == 0).sum().item() == 4 * (low + high)


def test_a_token_without_an_advantage_is_not_counted_as_clipped() -> None:
    batch = {
        "advantages": torch.tensor([[0.0, 0.0, 1.0, -1.0]]),
        "token_mask": torch.ones(1, 4),
        "sample_mask": torch.ones(1),
        "prev_logprobs": torch.tensor([[-1.0, -2.0, -2.0, -1.0]]),
    }
    logprobs = torch.tensor([[-2.0, -1.0, -1.0, -2.0]])
    config = ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
    _, metrics = ClippedPGLossFn(config)(logprobs, batch, global_valid_toks=4, global_valid_seqs=1)
    assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == 0.25


@every_config
def test_only_the_policy_has_a_gradient(knobs: dict[str, Any]) -> None:
    batch = rollouts()
    logprobs = batch.pop("logprobs").requires_grad_()
    others = {name: value.requires_grad_() for name, value in batch.items() if value.is_floating_point()}
    others |= {name: value for name, value in batch.items() if name not in others}
    loss, _ = ClippedPGLossFn(ClippedPGLossConfig(**knobs))(
        logprobs, others, global_valid_toks=9, global_valid_seqs=ROWS
    )
    loss.backward()
    assert logprobs.grad is not None
    assert all(value.grad is None for value in others.values())


def test_no_host_sync() -> None:
    """On the meta device any `.item()`, `bool()` or `tolist()` of a tensor raises."""
    batch = {key: value.to("meta") for key, value in rollouts(14).items()}
    logprobs = batch.pop("logprobs")
    for knobs in CONFIGS.values():
        counts = torch.zeros((), device="meta", dtype=torch.float64)
        ClippedPGLossFn(ClippedPGLossConfig(**knobs))(
            logprobs, batch, global_valid_toks=counts, global_valid_seqs=counts
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"advantages": None}, "batch has no 'advantages'"),
        ({"token_mask": None}, "batch has no 'token_mask'"),
        ({"reference_policy_logprobs": None}, r"no 'reference_policy_logprobs', which is needed for the KL term"),
        ({"generation_logprobs": None}, "no 'generation_logprobs', which is needed for use_importance_sampling"),
        ({"advantages": torch.zeros(ROWS)}, r"advantages has shape \[4\].* \[4, 6\] or \[4, 1\]"),
        ({"sample_mask": torch.zeros(ROWS, 1)}, r"sample_mask has shape \[4, 1\].*must have shape \[4\]"),
        ({"prev_logprobs": torch.zeros(ROWS, TOKENS - 1)}, r"prev_logprobs has shape \[4, 5\], but logprobs"),
        ({"logprobs": torch.zeros(ROWS)}, r"logprobs has shape \(4,\)"),
    ],
)
def test_bad_tensors_are_named_before_any_arithmetic(change: dict[str, Any], text: str) -> None:
    batch = rollouts() | change
    logprobs = batch.pop("logprobs")
    config = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    with pytest.raises(ValueError, match=text):
        ClippedPGLossFn(config)(logprobs, batch, global_valid_toks=1, global_valid_seqs=1)


TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"ratio_clip_min": -0.1}, "ratio_clip_min=-0.1"),
        ({"ratio_clip_max": -0.1}, "ratio_clip_max=-0.1"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c=1.0: the dual clip must be > 1"),
        ({"sequence_level_importance_ratios": True}, "Set token_level_loss=False"),
        ({"disable_ppo_ratio": True, "force_on_policy_ratio": True}, "has no ratio to force"),
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "REINFORCE clips nothing"),
        (
            {"disable_ppo_ratio": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
            "REINFORCE has no ratio",
        ),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo=True with ratio_clip_c=3.0"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo=True with disable_ppo_ratio=True"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "use_cispo=True with force_on_policy_ratio=True"),
        ({"use_cispo": True, "token_level_loss": False}, "use_cispo=True with token_level_loss=False"),
        (
            {"use_cispo": True, "token_level_loss": False, "sequence_level_importance_ratios": True},
            "use_cispo=True with sequence_level_importance_ratios=True",
        ),
        ({"reference_policy_kl_penalty": -0.1}, "must be >= 0"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type='k4'"),
        ({"kl_importance_weight": "ratio"}, "kl_importance_weight='ratio'"),
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value=0.0: a clamp must be > 0"),
        ({"kl_output_clamp_value": -1.0}, "kl_output_clamp_value=-1.0"),
        (
            {"use_on_policy_kl_approximation": True, "kl_importance_weight": "none"},
            "both choose the weight of the KL term",
        ),
        ({"truncated_importance_sampling_ratio": 2.0}, "without truncated_importance_sampling_type"),
        ({"truncated_importance_sampling_type": "tis"}, "Set use_importance_sampling_correction=True"),
        (TIS, "needs an upper bound > 0"),
        (TIS | {"truncated_importance_sampling_ratio": 0.0}, "needs an upper bound > 0"),
        (TIS | {"truncated_importance_sampling_type": "mis"}, "truncated_importance_sampling_type='mis'"),
        (
            TIS | {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
            "icepop needs a lower bound too",
        ),
        (
            TIS | {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 2.0},
            "seq-mask-tis needs a lower bound too",
        ),
        (
            TIS | {"truncated_importance_sampling_ratio": 1.0, "truncated_importance_sampling_ratio_min": 2.0},
            "must be >= 0 and not above the upper one",
        ),
        ({"ratio_clip_min": float("nan")}, "ratio_clip_min is NaN"),
    ],
)
def test_illegal_knobs(knobs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ClippedPGLossConfig(**knobs)


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"ratio_clip_min": "0.2"}, "ratio_clip_min='0.2' is a str"),
        ({"ratio_clip_max": None}, "ratio_clip_max=None"),
        ({"token_level_loss": 1}, "token_level_loss=1 is a int"),
        ({"ratio_clip_min": True}, "ratio_clip_min=True is a bool"),
    ],
)
def test_knobs_of_the_wrong_type(knobs: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ClippedPGLossConfig(**knobs)


def test_numbers_that_yaml_reads_as_text() -> None:
    assert ClippedPGLossConfig.from_dict({"ratio_clip_min": "3e-4"}).ratio_clip_min == 3e-4
    with pytest.raises(TypeError, match="ratio_clip_min='small' is text"):
        ClippedPGLossConfig.from_dict({"ratio_clip_min": "small"})


def test_a_token_that_the_engine_could_not_score() -> None:
    """Its weight is 0 and it says nothing about the mismatch; the other tokens are as before."""
    batch = {"prev_logprobs": [[-1.0, -2.0]], "generation_logprobs": [[float("nan"), -2.5]]}
    _, grad, metrics = loss_and_grad([[-1.0, -2.0]], [[1.0]], batch=batch, use_importance_sampling_correction=True)
    assert grad.tolist() == [[0.0, pytest.approx(-math.exp(0.5) / 2)]]
    assert metrics["token_mult_prob_error"].item() == pytest.approx((1 + math.exp(0.5)) / 2)
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
@every_config
def test_an_empty_micro_batch(knobs: dict[str, Any], shape: tuple[int, int]) -> None:
    full = torch.zeros(shape, dtype=torch.float64)
    keys = ("logprobs", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages", "token_mask")
    loss, grad, _ = run(dict.fromkeys(keys, full) | {"sample_mask": torch.ones(shape[0])}, (5, 2), **knobs)
    assert loss.item() == 0
    assert grad.shape == shape


def test_the_loss_takes_a_config_and_nothing_else() -> None:
    with pytest.raises(TypeError, match="config is a dict: it must be a ClippedPGLossConfig"):
        ClippedPGLossFn({"ratio_clip_min": 0.1})  # type: ignore[arg-type]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_on_the_bound_is_not_clipped(advantage: float) -> None:
    batch = {**rollouts(), "advantages": torch.full((ROWS, 1), advantage)}
    batch["prev_logprobs"] = batch["logprobs"]
    _, _, metrics = run(batch, ratio_clip_min=0.0, ratio_clip_max=0.0, reference_policy_kl_penalty=0.0)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


@every_config
def test_metrics_may_be_averaged_over_other_counts(knobs: dict[str, Any]) -> None:
    """Where rows that add nothing to the loss are left out, the metrics are those of the rows that are there."""
    batch = rollouts()
    logprobs, counts = batch.pop("logprobs"), {"metric_valid_toks": 10.0, "metric_valid_seqs": 2.0}
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(**knobs))
    loss, metrics = loss_fn(logprobs, batch, global_valid_toks=40.0, global_valid_seqs=8.0, **counts)
    expected_loss, of_all = loss_fn(logprobs, batch, global_valid_toks=40.0, global_valid_seqs=8.0)
    assert loss == expected_loss
    for name, value in metrics.items():
        scale = 4 if METRIC_REDUCTIONS[name] == "sum" and name not in ("num_valid_samples", "kl_penalty") else 1
        torch.testing.assert_close(value, scale * of_all[name], **EXACT, msg=name)


class Syncs(TorchDispatchMode):
    """Counts what makes the host wait for the device: a value read, or a shape that depends on one."""

    names = ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique", "_unique2", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        boolean_index = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.names or boolean_index:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@every_config
def test_the_loss_never_waits_for_the_device(knobs: dict[str, Any]) -> None:
    batch = rollouts(dtype=torch.float32)
    logprobs = batch.pop("logprobs").requires_grad_()
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(**knobs))
    with Syncs() as syncs:
        loss, _ = loss_fn(logprobs, batch, global_valid_toks=torch.tensor(20.0), global_valid_seqs=torch.tensor(4.0))
        loss.backward()
    assert not syncs.seen
    with Syncs() as syncs:  # the test would see one
        loss.item()
        logprobs[logprobs > 0]
    assert len(syncs.seen) >= 2

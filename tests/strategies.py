"""What hypothesis draws: legal knobs of the loss, batches, reward tables, knobs of the estimators.

A draw decides the structure (knobs, shape, masks) and a seed; NumPy fills in the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossConfig

# No deadline and no random seed: a machine that is busy, or a new draw, must not fail somebody else's change.
BASE = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)

ENGINE_KEYS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")


# Of ranges beyond 24 bits hypothesis prefers the small numbers, and would repeat the same few batches.
seeds = st.integers(0, 2**24 - 1)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers with three decimals: no subnormals, no neighbours one rounding error apart."""
    return st.integers(round(low * 1000), round(high * 1000)).map(lambda n: n / 1000)


@st.composite
def loss_knobs(draw: st.DrawFn, method: str | None = None, **fixed: Any) -> dict[str, Any]:
    """Knobs that `ClippedPGLossConfig` accepts; `fixed` ones win."""
    method = method or draw(st.sampled_from(["ppo", "ppo", "dual_clip", "gspo", "cispo", "reinforce", "on_policy"]))
    knobs: dict[str, Any] = {
        "ratio_clip_min": draw(floats(0.001, 0.9)),
        "ratio_clip_max": draw(floats(0.001, 3)),
        "token_level_loss": method == "cispo" or (method != "gspo" and draw(st.booleans())),
        "reference_policy_kl_penalty": draw(st.one_of(st.just(0.0), floats(0.001, 2))),
        "reference_policy_kl_type": draw(st.sampled_from(["k1", "k2", "k3"])),
        "kl_input_clamp_value": draw(st.one_of(st.none(), st.just(20.0), floats(0.05, 1))),
        "kl_output_clamp_value": draw(st.one_of(st.none(), st.just(10.0), floats(0.01, 0.5))),
        "kl_importance_weight": draw(st.sampled_from(["score_function", "policy_ratio", "none"])),
        "use_kl_in_reward": draw(st.integers(0, 9)) == 9,
        "use_importance_sampling_correction": draw(st.booleans()),
    }
    if (method in ("dual_clip", "gspo") and draw(st.booleans())) or method == "dual_clip":
        knobs["ratio_clip_c"] = draw(floats(1.01, 5))
    knobs |= {
        "gspo": {"sequence_level_importance_ratios": True, "force_on_policy_ratio": draw(st.integers(0, 4)) == 4},
        "cispo": {"use_cispo": True},
        "reinforce": {"disable_ppo_ratio": True},
        "on_policy": {"force_on_policy_ratio": True},
    }.get(method, {})
    if draw(st.integers(0, 3)) == 3:
        knobs |= {"use_on_policy_kl_approximation": True, "kl_importance_weight": "score_function"}
    kind = draw(st.sampled_from([None, "tis", "icepop", "seq-mask-tis"]))
    if kind is not None and (knobs | fixed)["use_importance_sampling_correction"]:
        low = draw(floats(0, 1.1))
        knobs |= {
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": low + draw(floats(0.1, 2)),
            "truncated_importance_sampling_ratio_min": None if kind == "tis" and draw(st.booleans()) else low,
        }
    knobs |= fixed
    ClippedPGLossConfig(**knobs)
    return knobs


@dataclass
class Case:
    """One micro-batch as NumPy arrays, with the counts of its optimizer step."""

    logprobs: np.ndarray
    batch: dict[str, np.ndarray]
    toks: float
    seqs: float

    @property
    def valid(self) -> np.ndarray:
        """`[B, T]`: the positions that count."""
        return (self.batch["token_mask"] != 0) & (self.batch["sample_mask"] != 0)[:, None]


@st.composite
def cases(
    draw: st.DrawFn,
    rows: tuple[int, int] = (1, 5),
    tokens: tuple[int, int] = (1, 7),
    masks: tuple[str, ...] = (*["full"] * 4, *["ragged"] * 6, *["holes"] * 7, "nothing"),
) -> Case:
    """A micro-batch: ragged masks with holes, rows masked out, numbers under the mask that must not be read.

    Log-probabilities differ by tenths of a nat between the policies, never by less than 0.01 unless they are equal:
    k3 of a smaller difference has no 12 digits.
    """
    B, T, kind = draw(st.integers(*rows)), draw(st.integers(*tokens)), draw(st.sampled_from(masks))
    rng = np.random.default_rng([draw(seeds), B, T])

    def chance(p: float) -> bool:
        return rng.uniform() < p

    spread = rng.choice([0.1, 0.3, 1.0])

    def away(lp: np.ndarray) -> np.ndarray:
        d = spread * rng.normal(size=lp.shape)
        return lp + np.where(np.abs(d) < 0.01, 0.01 + np.abs(d), d)

    prev = -np.abs(rng.normal(size=(B, T))) - 0.1
    lp = prev.copy() if chance(0.15) else away(prev)
    arrays = {
        "prev_logprobs": prev,
        "generation_logprobs": prev.copy() if chance(0.15) else away(prev),
        "reference_policy_logprobs": away(lp),
        "advantages": rng.normal(size=(B, T if chance(0.5) else 1)),
        "policy_weights": rng.uniform(0, 2, size=(B, T if chance(0.5) else 1)),
    }
    for key, p in (("prev_logprobs", 0.1), ("policy_weights", 0.5)):
        if chance(p):
            del arrays[key]

    token_mask, sample_mask = np.ones((B, T)), np.ones(B)
    if kind in ("ragged", "holes"):
        token_mask = (np.arange(T) < rng.integers(1, T + 1, size=(B, 1))).astype(float)
        sample_mask = (rng.uniform(size=B) < 0.85).astype(float)
    if kind == "holes":
        token_mask *= rng.uniform(size=(B, T)) < 0.7
    if kind == "nothing":
        (token_mask if chance(0.5) else sample_mask)[:] = 0
    case = Case(lp, {**arrays, "token_mask": token_mask, "sample_mask": sample_mask}, 0.0, 0.0)
    if chance(0.5):
        for values in (lp, *arrays.values()):
            masked = ~case.valid if values.shape == (B, T) else ~case.valid.any(1, keepdims=True)
            np.copyto(values, rng.choice([np.nan, np.inf, -np.inf, 200.0, -1e4], size=values.shape), where=masked)
    # The step is this micro-batch, or larger.
    case.toks = float(case.valid.sum() + rng.choice([0, 5]))
    case.seqs = float(sample_mask.sum() + rng.choice([0, 3]))
    return case


@st.composite
def extreme_cases(draw: st.DrawFn) -> Case:
    """Some log-probabilities of one policy or of several are -1e4, -700 or 0, and advantages are in the thousands."""
    case = draw(cases())
    rng = np.random.default_rng(draw(seeds))
    keys = draw(st.lists(st.sampled_from(["logprobs", *ENGINE_KEYS]), min_size=1, unique=True))
    for key in keys:
        values = case.logprobs if key == "logprobs" else case.batch.get(key)
        if values is not None:
            where = case.valid & (rng.uniform(size=values.shape) < 0.5)
            np.copyto(values, rng.choice([-1e4, -700.0, 0.0], size=values.shape), where=where)
    case.batch["advantages"] *= 1e3
    return case


# --------------------------------------------------------------------------------------------------------------------
# Estimators
# --------------------------------------------------------------------------------------------------------------------


@st.composite
def estimator_knobs(draw: st.DrawFn, name: str | None = None, clip: bool = True, **fixed: Any) -> dict[str, Any]:
    """Knobs that `AdvEstimatorConfig` accepts; `fixed` ones win."""
    name = name or draw(st.sampled_from(["grpo", "gdpo", "reinforce_plus_plus"]))
    knobs: dict[str, Any] = {"name": name}
    if name == "reinforce_plus_plus":
        knobs["minus_baseline"] = draw(st.booleans())
    else:
        knobs |= {"use_leave_one_out_baseline": draw(st.booleans()), "normalize_rewards": draw(st.booleans())}
    if clip and draw(st.integers(0, 3)) == 3:
        knobs |= {"advantage_clip_low": draw(floats(-1, 0)), "advantage_clip_high": draw(floats(0, 1))}
    knobs |= fixed
    AdvEstimatorConfig(**knobs)
    return knobs


@dataclass
class Rewards:
    """The rewards of one generation batch, NaN where a component does not apply."""

    groups: list[int]
    table: dict[str, np.ndarray]
    weights: dict[str, float]
    mask: np.ndarray
    policy: np.ndarray
    reference: np.ndarray


@st.composite
def reward_tables(draw: st.DrawFn, holes: bool = True, components: tuple[int, int] = (2, 3)) -> Rewards:
    """Groups of any size in mixed order.

    Rewards are binary, few-valued or many-valued multiples of 1/64, weights of 1/8: sums of them are exact, so that
    equal totals are equal numbers.
    """
    P, T, K = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(*components))
    rng = np.random.default_rng([draw(seeds), P, T, K])
    groups = rng.permutation(np.repeat(rng.permutation(20)[:P], rng.integers(1, 7, size=P)))
    N = len(groups)
    table = {}
    for name in "abc"[:K]:
        kind = rng.choice(["binary", "few", "many", "constant"], p=[0.3, 0.3, 0.3, 0.1])
        values = {
            "binary": rng.integers(0, 2, N) * 1.0,
            "few": rng.choice([0.0, 0.25, 1.0, -0.5], N),
            "many": rng.integers(-640, 640, N) / 64,
            "constant": np.full(N, 0.75),
        }[kind]
        if holes and rng.uniform() < 0.3:
            values = np.where(rng.uniform(size=N) < 0.25, np.nan, values)
        table[name] = values
    mask = (np.arange(T) < rng.integers(1, T + 1, size=(N, 1))).astype(float)
    if holes and rng.uniform() < 0.5:
        mask *= rng.uniform(size=(N, T)) < 0.7
    policy = -np.abs(rng.normal(size=(N, T)))
    weights = {name: float(rng.choice([1.0, 0.5, 2.0, -0.125])) for name in table}
    return Rewards(groups.tolist(), table, weights, mask, policy, policy + 0.3 * rng.normal(size=(N, T)))

"""One clipped policy-gradient loss that is PPO, GRPO, RLOO, DAPO, GSPO, CISPO or dual clip by configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .importance import actor_weights, finite_exp, policy_log_ratio, truncate_weights
from .kl import js_estimate, kl_estimate, kl_penalty
from .loss_config import PRESETS, ClippedPGLossConfig
from .reductions import clean_sum, divisor

__all__ = ["ENGINE_METRICS", "METRIC_REDUCTIONS", "PRESETS", "ClippedPGLossConfig", "ClippedPGLossFn"]

# How a metric of several micro-batches and processes becomes one. The means are already divided by the counts of the
# whole optimizer step, so that their sum is the mean.
METRIC_REDUCTIONS: dict[str, str] = {
    "probs_ratio": "sum",
    "probs_ratio_min": "min",
    "probs_ratio_max": "max",
    "probs_ratio_clamped": "sum",
    "probs_ratio_clamped_min": "min",
    "probs_ratio_clamped_max": "max",
    "clip_fraction_low": "sum",
    "clip_fraction_high": "sum",
    "kl_penalty": "sum",
    "kl": "sum",
    "token_mult_prob_error": "sum",
    "gen_kl_error": "sum",
    "policy_kl_error": "sum",
    "js_divergence_error": "sum",
    "sampling_importance_ratio": "sum",
    "approx_entropy": "sum",
    "is_oob_ratio": "sum",
    "num_valid_samples": "sum",
}

# The metrics that compare the training engine with the one that sampled.
ENGINE_METRICS = (
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "approx_entropy",
)


@dataclass(frozen=True)
class _Inputs:
    """The tensors of one micro-batch, `[B, T]`, in one dtype, with every masked position set to 0."""

    logprobs: Tensor
    prev: Tensor
    generation: Tensor
    reference: Tensor | None
    advantages: Tensor  # or [B, 1]
    policy_weights: Tensor | None
    mask: Tensor  # bool
    weight: Tensor  # the same as a number
    sample_mask: Tensor  # [B]


class ClippedPGLossFn:
    """The clipped policy-gradient loss, in nats.

    Per token, with `rho = exp(lp - prev)` and `clip(rho) = min(max(rho, 1 - ratio_clip_min), 1 + ratio_clip_max)`:

        L = max(-A rho, -A clip(rho)),   and   L = min(L, -A c)   where A < 0 (dual clip)
        L = -A lp                                                 (disable_ppo_ratio)
        L = -sg(clip(rho)) A lp                                   (use_cispo)

    with the actor weight `w = exp(prev - gen)` (no gradient; 1 without `use_importance_sampling_correction`), and
    `KL = v k(ref - lp)` from `kl.kl_penalty`:

        token level:     sum(m s w L) / global_valid_toks + beta sum(m s KL) / global_valid_toks
        sequence level:  sum_i s_i mean_t(w L) / global_valid_seqs + beta sum_i s_i mean_t(KL) / global_valid_seqs

    GSPO (`sequence_level_importance_ratios`) has one ratio `rho_i = exp(mean_t(lp - prev))` and one weight
    `w_i = exp(sum_t(prev - gen))` a row.

    Args:
        config: the knobs.

    Source:
        PPO, arXiv:1707.06347. The papers of the other methods stand beside their presets.

    Example:
        >>> loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
        >>> batch = {
        ...     "advantages": torch.tensor([[1.0]]),
        ...     "token_mask": torch.ones(1, 2),
        ...     "sample_mask": torch.ones(1),
        ...     "prev_logprobs": torch.tensor([[-1.0, -1.0]]),
        ... }
        >>> loss, metrics = loss_fn(torch.tensor([[-1.0, 0.0]]), batch, global_valid_toks=2, global_valid_seqs=1)
        >>> round(loss.item(), 4)  # -(1 + 1.2) / 2: the second ratio, e, is clipped
        -1.1
    """

    def __init__(self, config: ClippedPGLossConfig) -> None:
        if not isinstance(config, ClippedPGLossConfig):
            raise TypeError(f"config is a {type(config).__name__}: it must be a ClippedPGLossConfig.")
        self.config = config

    def __call__(
        self,
        logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_toks: Tensor | float,
        global_valid_seqs: Tensor | float,
        metric_valid_toks: Tensor | float | None = None,
        metric_valid_seqs: Tensor | float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the share of this micro-batch in the loss of the optimizer step.

        Args:
            logprobs: `lp`, `[B, T]`, floating point, nats, the only tensor with gradient. Half precision is computed
                in float32.
            batch: `advantages` `[B, T]` or `[B, 1]`; `token_mask` `[B, T]`; `sample_mask` `[B]`; and, where needed,
                `prev_logprobs` (absent: `sg(lp)`), `generation_logprobs` (absent: `prev`),
                `reference_policy_logprobs`, all `[B, T]`, nats. Optional `policy_weights`, `[B, T]` or `[B, 1]`:
                further weights of the policy term (an entropy mask, a correction made elsewhere).
            global_valid_toks: number of valid tokens of the whole optimizer step, over all processes.
            global_valid_seqs: number of valid rows of the whole optimizer step, over all processes.
            metric_valid_toks: number of valid tokens that the metrics are averaged over, where rows that add nothing to
                the loss were left out; by default `global_valid_toks`.
            metric_valid_seqs: the same of rows.

        Returns:
            `(loss, metrics)`: a scalar attached to the graph even when nothing is valid, and detached scalars whose
            reduction over micro-batches and processes `METRIC_REDUCTIONS` declares.

        Raises:
            ValueError: a tensor is missing or has the wrong shape.
        """
        config = self.config
        x = self._inputs(logprobs, batch)
        toks, seqs = divisor(global_valid_toks, x.weight), divisor(global_valid_seqs, x.weight)

        def mean(values: Tensor) -> Tensor:
            if config.token_level_loss:
                return clean_sum(values, x.weight) / toks
            of_rows = (values * x.weight).sum(-1) / divisor(x.weight.sum(-1), x.weight)
            return clean_sum(of_rows, x.sample_mask) / seqs

        log_ratio = policy_log_ratio(x.logprobs, x.prev, x.mask, sequence_level=config.sequence_level_importance_ratios)
        ratio = torch.exp(log_ratio)
        token_loss, used_ratio, clipped_ratio = self._policy_loss(x, ratio)

        engine_log_ratio = x.prev - x.generation
        weights, out_of_bounds = self._actor_weights(engine_log_ratio, x.mask)
        if config.use_importance_sampling_correction:
            token_loss = weights * token_loss
        if x.policy_weights is not None:
            token_loss = x.policy_weights * token_loss
        loss = mean(token_loss)

        kl = token_kl = None
        if config.has_kl_term:
            token_kl = self._kl(x, ratio)
            kl = mean(token_kl)
            loss = loss + config.reference_policy_kl_penalty * kl

        with torch.no_grad():
            toks = toks if metric_valid_toks is None else divisor(metric_valid_toks, x.weight)
            seqs = seqs if metric_valid_seqs is None else divisor(metric_valid_seqs, x.weight)
            per_token = self._mismatch_metrics(x, engine_log_ratio)
            per_token |= {"probs_ratio": used_ratio, "probs_ratio_clamped": clipped_ratio}
            per_row: dict[str, Tensor] = {}
            of_weights = per_row if config.sequence_level_importance_ratios else per_token
            of_weights["sampling_importance_ratio"] = weights
            kind = config.truncated_importance_sampling_type
            if kind is not None:
                of_bounds = per_row if kind == "seq-mask-tis" else per_token
                of_bounds["is_oob_ratio"] = out_of_bounds
            if token_kl is not None:
                per_token["kl"] = token_kl

            metrics = {name: clean_sum(v.expand_as(x.mask), x.weight) / toks for name, v in per_token.items()}
            metrics |= {name: clean_sum(v.squeeze(-1), x.sample_mask) / seqs for name, v in per_row.items()}
            metrics |= self._clip_fractions(x, used_ratio, toks)
            metrics |= _extremes({"probs_ratio": used_ratio, "probs_ratio_clamped": clipped_ratio}, x.mask)
            nothing = loss.new_zeros(())
            metrics["kl_penalty"] = nothing if kl is None else kl.detach()  # averaged as the loss is
            metrics.setdefault("kl", nothing)
            metrics["num_valid_samples"] = x.sample_mask.sum()
        return loss, metrics

    def _policy_loss(self, x: _Inputs, ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(L, the ratio that L is made of, that ratio clipped)`, each `[B, T]`."""
        config = self.config
        if config.disable_ppo_ratio:
            return -x.advantages * x.logprobs, x.logprobs, x.logprobs
        low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
        clipped = ratio.detach().clamp(low, high)
        if config.use_cispo:
            return -clipped * x.advantages * x.logprobs, ratio, clipped
        # max(-A rho, -A clip(rho)) clips from above where A > 0 and from below where A < 0; the dual clip is the other
        # bound of the latter.
        falls = x.advantages < 0
        lower = torch.full_like(x.advantages, -math.inf).masked_fill(falls, low)
        upper = torch.full_like(x.advantages, high).masked_fill(falls, config.ratio_clip_c or math.inf)
        return -x.advantages * ratio.clamp(lower, upper), ratio, clipped

    def _actor_weights(self, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """`(w, 1 where it was out of bounds)`: `[B, T]`, or `[B, 1]` where a row has one weight or one decision."""
        config = self.config
        weights = actor_weights(log_ratio, mask, sequence_level=config.sequence_level_importance_ratios)
        if config.truncated_importance_sampling_type is None:
            return weights, weights.new_zeros(())
        high = config.truncated_importance_sampling_ratio
        weights, out_of_bounds = truncate_weights(
            weights,
            log_ratio,
            mask,
            kind=config.truncated_importance_sampling_type,
            low=config.truncated_importance_sampling_ratio_min or 0.0,
            high=math.inf if high is None else high,
        )
        return weights, out_of_bounds.to(weights.dtype)

    def _kl(self, x: _Inputs, ratio: Tensor) -> Tensor:
        config = self.config
        weight = None
        if config.use_on_policy_kl_approximation:
            weight = finite_exp(x.logprobs - x.generation)
        elif config.kl_importance_weight == "policy_ratio":
            weight = ratio
        return kl_penalty(
            cast(Tensor, x.reference) - x.logprobs,  # `_check_batch` has seen that it is there
            config.reference_policy_kl_type,
            weight=weight,
            score_function=weight is None and config.kl_importance_weight == "score_function",
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
        )

    def _clip_fractions(self, x: _Inputs, ratio: Tensor, toks: Tensor) -> dict[str, Tensor]:
        config = self.config
        if config.disable_ppo_ratio:
            return dict.fromkeys(("clip_fraction_low", "clip_fraction_high"), ratio.new_zeros(()))
        below, above = (ratio < 1 - config.ratio_clip_min) & x.mask, (ratio > 1 + config.ratio_clip_max) & x.mask
        if not config.use_cispo:
            # The clip bites where it stops the gradient; CISPO's cuts the weight whatever the advantage.
            below, above = below & (x.advantages < 0), above & (x.advantages > 0)
        return {"clip_fraction_low": below.sum() / toks, "clip_fraction_high": above.sum() / toks}

    def _mismatch_metrics(self, x: _Inputs, log_ratio: Tensor) -> dict[str, Tensor]:
        """Per token, how the training engine and the one that sampled differ; `log_ratio` is `prev - gen`."""
        kl_type = self.config.reference_policy_kl_type
        # A token that the engine could not score (NaN) is no evidence of a mismatch.
        log_ratio = log_ratio.nan_to_num(0.0, 0.0, 0.0)
        excess = torch.expm1(log_ratio.abs())
        return {
            "token_mult_prob_error": 1 + excess,
            "gen_kl_error": kl_estimate(log_ratio, kl_type),
            "policy_kl_error": kl_estimate(-log_ratio, kl_type),
            "js_divergence_error": js_estimate(log_ratio, excess),
            "approx_entropy": -finite_exp(x.logprobs - x.prev + log_ratio) * x.logprobs,
        }

    def _inputs(self, logprobs: Tensor, batch: Mapping[str, Tensor]) -> _Inputs:
        _check_batch(self.config, logprobs, batch)
        # Half precision is too coarse for ratios near 1.
        dtype = torch.promote_types(logprobs.dtype, torch.float32)
        sample_mask = batch["sample_mask"].bool()
        mask = batch["token_mask"].bool() & sample_mask[:, None]

        def clean(values: Tensor) -> Tensor:
            rows = mask.any(-1, keepdim=True) if values.shape != mask.shape else mask
            return torch.where(rows, values.to(dtype), 0)

        def optional(key: str) -> Tensor | None:
            return clean(batch[key].detach()) if batch.get(key) is not None else None

        lp = clean(logprobs)
        prev = None if self.config.force_on_policy_ratio else optional("prev_logprobs")
        prev = lp.detach() if prev is None else prev
        generation = optional("generation_logprobs")
        return _Inputs(
            logprobs=lp,
            prev=prev,
            generation=prev if generation is None else generation,
            reference=optional("reference_policy_logprobs"),
            advantages=clean(batch["advantages"].detach()),
            policy_weights=optional("policy_weights"),
            mask=mask,
            weight=mask.to(dtype),
            sample_mask=sample_mask.to(dtype),
        )


def _extremes(named: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Least and largest of the values that are not masked; `inf` and `-inf` of none."""
    if not mask.numel():
        mask = mask.new_zeros(1)
        named = {name: values.new_zeros(1) for name, values in named.items()}
    away = torch.where(mask, 0.0, math.inf)  # beyond any value
    extremes = {f"{name}_min": (values + away).amin() for name, values in named.items()}
    return extremes | {f"{name}_max": (values - away).amax() for name, values in named.items()}


def _check_batch(config: ClippedPGLossConfig, logprobs: Tensor, batch: Mapping[str, Tensor]) -> None:
    if logprobs.dim() != 2 or not logprobs.is_floating_point():
        raise ValueError(
            f"logprobs has shape {tuple(logprobs.shape)} and dtype {logprobs.dtype}: a float [B, T] is needed."
        )
    rows, tokens = logprobs.shape
    needed = {"advantages": "always", "token_mask": "always", "sample_mask": "always"}
    if config.has_kl_term:
        needed["reference_policy_logprobs"] = (
            f"for the KL term (reference_policy_kl_penalty={config.reference_policy_kl_penalty})"
        )
    if config.needs_generation_logprobs:
        needed["generation_logprobs"] = (
            "for use_importance_sampling_correction or use_on_policy_kl_approximation; they come from the engine that "
            "sampled: set use_vllm=True, or return the log-probability of every sampled token as `logprobs` from the "
            "rollout_func"
        )
    for key, why in needed.items():
        if batch.get(key) is None:
            raise ValueError(f"batch has no {key!r}, which is needed {why}.")
    full: list[tuple[int, ...]] = [(rows, tokens)]
    either: list[tuple[int, ...]] = [(rows, tokens), (rows, 1)]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "advantages": either,
        "token_mask": full,
        "sample_mask": [(rows,)],
        "prev_logprobs": full,
        "generation_logprobs": full,
        "reference_policy_logprobs": full,
        "policy_weights": either,
    }
    for key, allowed in shapes.items():
        value = batch.get(key)
        if value is not None and tuple(value.shape) not in allowed:
            raise ValueError(
                f"{key} has shape {list(value.shape)}, but logprobs has shape {[rows, tokens]}: it must have shape "
                + " or ".join(str(list(shape)) for shape in allowed)
                + "."
            )

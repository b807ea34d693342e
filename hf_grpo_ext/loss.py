"""One clipped policy-gradient loss that is PPO, GRPO, RLOO, DAPO, GSPO, CISPO or dual clip by configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .importance import actor_weights, finite_exp, policy_log_ratio, truncate_weights
from .kl import kl_estimate, kl_penalty
from .loss_config import PRESETS, ClippedPGLossConfig
from .reductions import masked_mean, token_mean

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
    advantages: Tensor
    policy_weights: Tensor
    mask: Tensor
    sample_mask: Tensor


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
        toks = global_valid_toks if metric_valid_toks is None else metric_valid_toks
        seqs = global_valid_seqs if metric_valid_seqs is None else metric_valid_seqs

        def mean(values: Tensor) -> Tensor:
            if config.token_level_loss:
                return masked_mean(values, x.mask, global_valid_toks)
            return masked_mean(token_mean(values, x.mask).squeeze(-1), x.sample_mask, global_valid_seqs)

        log_ratio = policy_log_ratio(x.logprobs, x.prev, x.mask, sequence_level=config.sequence_level_importance_ratios)
        ratio = torch.exp(log_ratio)
        token_loss, used_ratio, clipped_ratio = self._policy_loss(x, ratio)

        engine_log_ratio = (x.prev - x.generation).detach()
        weights, out_of_bounds = self._actor_weights(engine_log_ratio, x.mask)
        if config.use_importance_sampling_correction:
            token_loss = weights * token_loss
        loss = mean(x.policy_weights * token_loss)

        token_kl = self._kl(x, ratio) if config.has_kl_term else torch.zeros_like(x.prev)
        kl = mean(token_kl)
        loss = loss + config.reference_policy_kl_penalty * kl

        with torch.no_grad():
            metrics = self._ratio_metrics(x, used_ratio, clipped_ratio, toks)
            metrics |= self._mismatch_metrics(x, toks)
            metrics["kl_penalty"] = kl.detach()  # averaged as the loss is
            metrics["kl"] = masked_mean(token_kl, x.mask, toks)
            if config.sequence_level_importance_ratios:
                mean_weight = masked_mean(weights.squeeze(-1), x.sample_mask, seqs)
            else:
                mean_weight = masked_mean(weights, x.mask, toks)
            metrics["sampling_importance_ratio"] = mean_weight
            if config.truncated_importance_sampling_type == "seq-mask-tis":
                metrics["is_oob_ratio"] = masked_mean(out_of_bounds.squeeze(-1), x.sample_mask, seqs)
            elif config.truncated_importance_sampling_type is not None:
                metrics["is_oob_ratio"] = masked_mean(out_of_bounds.expand_as(x.mask), x.mask, toks)
            metrics["num_valid_samples"] = x.sample_mask.sum()
        return loss, metrics

    def _policy_loss(self, x: _Inputs, ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(L, the ratio that L is made of, that ratio clipped)`, each `[B, T]`."""
        config = self.config
        if config.disable_ppo_ratio:
            return -x.advantages * x.logprobs, x.logprobs, x.logprobs
        clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
        if config.use_cispo:
            return -clipped.detach() * x.advantages * x.logprobs, ratio, clipped
        loss = torch.maximum(-x.advantages * ratio, -x.advantages * clipped)
        if config.ratio_clip_c is not None:
            loss = torch.where(x.advantages < 0, torch.minimum(loss, -x.advantages * config.ratio_clip_c), loss)
        return loss, ratio, clipped

    def _actor_weights(self, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """`(w, 1 where it was out of bounds)`: `[B, T]`, or `[B, 1]` where a row has one weight or one decision."""
        config = self.config
        weights = actor_weights(log_ratio, mask, sequence_level=config.sequence_level_importance_ratios)
        if config.truncated_importance_sampling_type is None:
            return weights, torch.zeros_like(weights)
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
        weight: Tensor | None
        if config.use_on_policy_kl_approximation:
            weight = finite_exp(x.logprobs - x.generation)
        elif config.kl_importance_weight == "policy_ratio":
            weight = ratio
        elif config.kl_importance_weight == "score_function":
            weight = torch.exp(x.logprobs - x.logprobs.detach())
        else:
            weight = None
        return kl_penalty(
            cast(Tensor, x.reference) - x.logprobs,  # `_check_batch` has seen that it is there
            config.reference_policy_kl_type,
            weight=weight,
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
        )

    def _ratio_metrics(self, x: _Inputs, ratio: Tensor, clipped: Tensor, toks: Tensor | float) -> dict[str, Tensor]:
        config = self.config
        below, above = ratio < 1 - config.ratio_clip_min, ratio > 1 + config.ratio_clip_max
        if config.disable_ppo_ratio:
            below, above = torch.zeros_like(below), torch.zeros_like(above)
        elif not config.use_cispo:
            # The clip bites where it stops the gradient; CISPO's cuts the weight whatever the advantage.
            below, above = below & (x.advantages < 0), above & (x.advantages > 0)
        metrics = {
            "clip_fraction_low": masked_mean(below.to(ratio.dtype), x.mask, toks),
            "clip_fraction_high": masked_mean(above.to(ratio.dtype), x.mask, toks),
        }
        for name, values in (("probs_ratio", ratio), ("probs_ratio_clamped", clipped)):
            metrics[name] = masked_mean(values, x.mask, toks)
            nothing = values.new_full((1,), math.inf)  # so that an empty batch has extremes too
            metrics[f"{name}_min"] = torch.cat([values.masked_fill(~x.mask, math.inf).flatten(), nothing]).amin()
            metrics[f"{name}_max"] = torch.cat([values.masked_fill(~x.mask, -math.inf).flatten(), -nothing]).amax()
        return metrics

    def _mismatch_metrics(self, x: _Inputs, toks: Tensor | float) -> dict[str, Tensor]:
        kl_type = self.config.reference_policy_kl_type
        # A token that the engine could not score (NaN) is no evidence of a mismatch.
        generation = torch.where(x.generation.isfinite(), x.generation, x.prev)
        log_ratio = x.prev - generation
        log_mixture = torch.logaddexp(x.prev, generation) - math.log(2)
        js = (kl_estimate(x.prev - log_mixture, "k3") + kl_estimate(generation - log_mixture, "k3")) / 2
        per_token = {
            "token_mult_prob_error": torch.exp(log_ratio.abs()),
            "gen_kl_error": kl_estimate(log_ratio, kl_type),
            "policy_kl_error": kl_estimate(-log_ratio, kl_type),
            "js_divergence_error": js,
            "approx_entropy": -finite_exp(x.logprobs - generation) * x.logprobs,
        }
        return {name: masked_mean(values, x.mask, toks) for name, values in per_token.items()}

    def _inputs(self, logprobs: Tensor, batch: Mapping[str, Tensor]) -> _Inputs:
        _check_batch(self.config, logprobs, batch)
        # Half precision is too coarse for ratios near 1.
        dtype = torch.promote_types(logprobs.dtype, torch.float32)
        sample_mask = batch["sample_mask"].bool()
        mask = batch["token_mask"].bool() & sample_mask[:, None]

        def clean(values: Tensor) -> Tensor:
            values = values.to(dtype).expand_as(mask)
            return torch.where(mask, values, torch.zeros_like(values))

        def optional(key: str) -> Tensor | None:
            return clean(batch[key].detach()) if batch.get(key) is not None else None

        lp = clean(logprobs)
        prev = None if self.config.force_on_policy_ratio else optional("prev_logprobs")
        prev = lp.detach() if prev is None else prev
        generation = optional("generation_logprobs")
        policy_weights = optional("policy_weights")
        return _Inputs(
            logprobs=lp,
            prev=prev,
            generation=prev if generation is None else generation,
            reference=optional("reference_policy_logprobs"),
            advantages=clean(batch["advantages"].detach()),
            policy_weights=mask.to(dtype) if policy_weights is None else policy_weights,
            mask=mask,
            sample_mask=sample_mask.to(dtype),
        )


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
            "sampled (vLLM, a rollout_func)"
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

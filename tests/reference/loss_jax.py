"""The clipped policy-gradient loss in JAX: gradients by `jax.grad`, every rule about them a `stop_gradient`.

The formulas and the choices behind them are in `loss.py`, whose loops share no line with this. Needs float64
(`jax_enable_x64`); the import of JAX is inside the functions, so that the module can be collected without it.
"""

import math

from .loss import DEFAULTS

LARGEST_LOG_RATIO = math.log(1.7976931348623157e308) / 2


def loss_and_grad(config, logprobs, batch, global_valid_toks, global_valid_seqs):
    """`(loss, d loss / d logprobs)` as NumPy values, for arguments as those of `loss.reference_loss`."""
    import jax
    import numpy as np

    value, gradient = jax.value_and_grad(loss)(logprobs, config, batch, global_valid_toks, global_valid_seqs)
    return float(value), np.asarray(gradient)


def loss(logprobs, config, batch, global_valid_toks, global_valid_seqs):
    """The loss of one micro-batch, a scalar."""
    import jax.numpy as jnp
    from jax.lax import stop_gradient as sg

    config = {**DEFAULTS, **config}
    m = (batch["token_mask"] != 0) & (batch["sample_mask"] != 0)[:, None]
    by_row = config["sequence_level_importance_ratios"]

    def read(key):
        values = batch.get(key)
        return None if values is None else jnp.where(m, values, 0.0)

    def row_mean(x):
        return jnp.sum(jnp.where(m, x, 0.0), axis=1, keepdims=True) / jnp.maximum(m.sum(axis=1, keepdims=True), 1)

    def mean(x):
        if config["token_level_loss"]:
            return jnp.sum(jnp.where(m, x, 0.0)) / max(global_valid_toks, 1)
        return jnp.sum(row_mean(x)) / max(global_valid_seqs, 1)

    def finite_exp(x):
        finite = jnp.isfinite(jnp.exp(sg(x)))
        return jnp.where(finite, jnp.exp(jnp.where(finite, x, 0.0)), 0.0)

    lp, A, ref = jnp.where(m, logprobs, 0.0), read("advantages"), read("reference_policy_logprobs")
    prev = sg(lp) if config["force_on_policy_ratio"] or read("prev_logprobs") is None else read("prev_logprobs")
    gen = prev if read("generation_logprobs") is None else read("generation_logprobs")

    # The ratio.
    log_ratio = lp - prev
    if by_row:
        log_ratio = jnp.broadcast_to(row_mean(log_ratio), m.shape)
    too_large = sg(log_ratio) > LARGEST_LOG_RATIO
    rho = jnp.exp(jnp.where(too_large, LARGEST_LOG_RATIO, log_ratio))

    # The actor weight.
    w = jnp.ones_like(lp)
    if config["use_importance_sampling_correction"]:
        delta = sg(prev - gen)
        w = finite_exp(jnp.sum(delta, axis=1, keepdims=True) if by_row else delta)
        low, high = (
            config["truncated_importance_sampling_ratio_min"] or 0.0,
            config["truncated_importance_sampling_ratio"],
        )
        kind = config["truncated_importance_sampling_type"]
        if kind == "tis":
            w = jnp.clip(w, low, high)
        elif kind == "icepop":
            w = jnp.where((w >= low) & (w <= high), w, 0.0)
        elif kind == "seq-mask-tis":
            geometric = jnp.exp(row_mean(delta))
            w = jnp.where((geometric >= low) & (geometric <= high), w, 0.0)
        w = sg(w)

    # The policy term.
    low, high = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"]
    clipped = jnp.where(rho < low, low, jnp.where(rho > high, high, rho))
    if config["disable_ppo_ratio"]:
        L = -A * lp
    elif config["use_cispo"]:
        L = -sg(clipped) * A * lp
    elif config["force_on_policy_ratio"]:
        L = -A * rho
    else:
        # `where` and not `maximum`, which halves the gradient of a tie: a ratio inside the range is one.
        L = jnp.where(-A * clipped > -A * rho, -A * clipped, -A * rho)
    if config["ratio_clip_c"] is not None:
        ceiling = -A * config["ratio_clip_c"]
        L = jnp.where((A < 0) & (ceiling < L), ceiling, L)
    v = 1.0 if batch.get("policy_weights") is None else read("policy_weights")
    total = mean(w * v * L)

    # The KL term.
    beta = config["reference_policy_kl_penalty"]
    if beta == 0 or config["use_kl_in_reward"]:
        return total
    W = {
        "score_function": jnp.exp(lp - sg(lp)),
        "policy_ratio": rho,
        "none": jnp.ones_like(lp),
    }[config["kl_importance_weight"]]
    if config["use_on_policy_kl_approximation"]:
        W = finite_exp(lp - gen)
    x = ref - lp
    bound = config["kl_input_clamp_value"]
    if bound is not None:
        W = jnp.where(jnp.abs(x) > bound, sg(W), W)
        x = jnp.where(jnp.abs(x) > bound, sg(jnp.clip(x, -bound, bound)), x)
    k = {"k1": lambda: -x, "k2": lambda: x**2 / 2, "k3": lambda: jnp.expm1(x) - x}[config["reference_policy_kl_type"]]()
    KL = W * k
    bound = config["kl_output_clamp_value"]
    if bound is not None:
        KL = jnp.where(jnp.abs(KL) > bound, sg(jnp.clip(KL, -bound, bound)), KL)
    return total + beta * mean(KL)

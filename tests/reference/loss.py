"""The clipped policy-gradient loss in loops, with its gradient derived by hand.

Nothing here is fast and nothing is shared with `hf_grpo_ext`. Read it next to the papers:

    PPO, the clipped surrogate          arXiv:1707.06347, eq. 7
    dual clip (Ye et al. 2019)          arXiv:1912.09729
    DAPO, clip-higher and token mean    arXiv:2503.14476
    GSPO, one ratio a sequence          arXiv:2507.18071
    CISPO (MiniMax-M1)                  arXiv:2506.13585
    k1, k2, k3 (Schulman 2020)          http://joschu.net/blog/kl-approx.html
    KL weighted by the policy ratio     arXiv:2512.02556 (DeepSeek-V3.2)
    truncated importance sampling       Yao et al. 2025 ("tis"), arXiv:2510.18855 ("icepop")

Symbols: `lp` current log-probability (the only one with gradient), `prev` the training engine's at scoring time,
`gen` the sampling engine's, `ref` the reference policy's, `A` the advantage, `sg` stop-gradient. A position counts
when `token_mask` and `sample_mask` are both not 0; any other position is never read.

Choices that no paper makes, shared with the package:
- a policy log-ratio is cut off at half the largest exponent, `LARGEST_LOG_RATIO`; beyond it the gradient is 0;
- with `force_on_policy_ratio`, `prev` is `sg(lp)` everywhere: in the ratio, in the actor weight and in the metrics;
- where gen of a counted token is not finite, its weight is 0 (before tis clamps it) and the mismatch metrics read prev
  in its place; seq-mask-tis drops a row whose mean log-ratio is NaN, which the package does not (`test_reference.py`);
- a row that counts (`sample_mask`) without a counted token has the weight of an empty sum, exp(0) = 1;
- clip fractions count where the clip stops the gradient (the sign of A matters); CISPO's, where it cuts the weight.
"""

import math
from dataclasses import dataclass

import numpy as np

DEFAULTS = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "disable_ppo_ratio": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "kl_importance_weight": "score_function",
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
}

LARGEST_LOG_RATIO = math.log(np.finfo(np.float64).max) / 2


@dataclass
class Result:
    """What the loss returns, and how far its numbers can be trusted.

    `*_scale` is the sum of the absolute values of the terms: what a rounding error is relative to. `margin` is the
    distance of the nearest clip or clamp from its kink: finite differences need it to be well above their step.
    """

    loss: float
    grad: np.ndarray
    metrics: dict[str, float]
    loss_scale: float
    grad_scale: np.ndarray
    metric_scales: dict[str, float]
    margin: float


def exp(x):
    """e^x, with infinity instead of an OverflowError."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def finite_exp(x):
    """e^x, or 0 where it is not finite."""
    return exp(x) if math.isfinite(exp(x)) else 0.0


# --------------------------------------------------------------------------------------------------------------------
# Values with their derivatives
# --------------------------------------------------------------------------------------------------------------------


def policy_ratio(log_ratio):
    """rho = e^x and d rho / d x = e^x, for x up to the cut-off; constant beyond."""
    if log_ratio > LARGEST_LOG_RATIO:
        return exp(LARGEST_LOG_RATIO), 0.0
    return exp(log_ratio), exp(log_ratio)


def clip(x, low, high):
    """clip(x, low, high) and its derivative: 1 inside, 0 outside."""
    if x < low:
        return low, 0.0
    if x > high:
        return high, 0.0
    return x, 1.0


def clipped_surrogate(A, rho, config):
    """PPO's loss of one token and its derivative in rho.

        L = max(-A rho, -A clip(rho, 1 - ratio_clip_min, 1 + ratio_clip_max))
        A < 0 and a dual clip c:  L = min(L, -A c)

    The derivative is that of the branch which was chosen; inside the range both branches are the same one. A ratio
    that is forced to 1 is not clipped.

    Source: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729.
    """
    L, dL = -A * rho, -A
    if not config["force_on_policy_ratio"]:
        clipped, slope = clip(rho, 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"])
        if -A * clipped > L:
            L, dL = -A * clipped, -A * slope
    if config["ratio_clip_c"] is not None and A < 0:
        ceiling = -A * config["ratio_clip_c"]
        if ceiling < L:
            L, dL = ceiling, 0.0
    return L, dL


def kl_estimate(x, kind):
    """An estimate of KL(p || q) from x = log q - log p at a sample of p, and its derivative in x.

        k1 = -x          k2 = x^2 / 2          k3 = e^x - 1 - x

    Source: Schulman, Approximating KL Divergence (2020).
    """
    if kind == "k1":
        return -x, -1.0
    if kind == "k2":
        return x * x / 2, x
    if kind == "k3":
        # e^x - 1 loses its digits near 0.
        e_minus_1 = math.expm1(x) if x < 1 else exp(x) - 1
        return e_minus_1 - x, e_minus_1
    raise ValueError(kind)


def kl_term(x, W, config):
    """KL = clip(W k(clip(x, -in, in)), -out, out) of one token, and its derivatives in x and in W.

    dKL/dx = W k'(x) and dKL/dW = k(x) inside both clamps. Where the input clamp bites both are 0: k is a constant, and
    the weight is detached with it. Where the output clamp bites both are 0.
    """
    bound_in, bound_out = config["kl_input_clamp_value"], config["kl_output_clamp_value"]
    bites = bound_in is not None and abs(x) > bound_in
    k, dk = kl_estimate(math.copysign(bound_in, x) if bites else x, config["reference_policy_kl_type"])
    KL = W * k
    if bound_out is not None and abs(KL) > bound_out:
        return math.copysign(bound_out, KL), 0.0, 0.0
    return (KL, 0.0, 0.0) if bites else (KL, W * dk, k)


def actor_weights(prev, gen, config):
    """The weights of one row (lists over its counted tokens): used, share of it out of bounds.

        w_t = exp(prev_t - gen_t), no gradient, not finite -> 0
        sequence ratios: one weight for the row, w = exp(sum_t (prev_t - gen_t))

        tis           w <- clip(w, min, max); min is 0 where none is given
        icepop        w <- w where min <= w <= max, else 0
        seq-mask-tis  w <- w where min <= exp(mean_t (prev_t - gen_t)) <= max, else 0 for the whole row

    Returns:
        The weights, one for a row or one a token, and for each whether it was out of bounds.

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025);
    IcePop, arXiv:2510.18855.
    """
    differences = [p - g for p, g in zip(prev, gen, strict=True)]
    if config["sequence_level_importance_ratios"]:
        known = all(math.isfinite(d) for d in differences)
        weights = [finite_exp(math.fsum(differences)) if known else 0.0]
    else:
        weights = [finite_exp(d) if math.isfinite(d) else 0.0 for d in differences]

    kind = config["truncated_importance_sampling_type"]
    if kind is None:
        return weights, [False] * len(weights)
    low = config["truncated_importance_sampling_ratio_min"] or 0.0
    high = config["truncated_importance_sampling_ratio"]
    if kind == "seq-mask-tis":
        mean = math.fsum(differences) / len(differences) if differences else 0.0
        outside = [not low <= exp(mean) <= high] * len(weights)
    else:
        outside = [not low <= w <= high for w in weights]
    if kind == "tis":
        return [clip(w, low, high)[0] for w in weights], outside
    if kind in ("icepop", "seq-mask-tis"):
        return [0.0 if out else w for w, out in zip(weights, outside, strict=True)], outside
    raise ValueError(kind)


# --------------------------------------------------------------------------------------------------------------------
# The loss
# --------------------------------------------------------------------------------------------------------------------


def reference_loss(config, logprobs, batch, global_valid_toks, global_valid_seqs, frozen=None):
    """Loss, gradient and metrics of one micro-batch.

        token level     sum_it w v L / Z_tok + beta sum_it KL / Z_tok
        sequence level  sum_i (1/n_i) sum_t w v L / Z_seq + beta sum_i (1/n_i) sum_t KL / Z_seq

    with n_i the counted tokens of row i, w the actor weight, v `policy_weights`, and

        PPO        L = clipped_surrogate(A, rho), rho = exp(lp - prev)      dL/dlp = dL/drho rho
        GSPO       rho_i = exp(mean_t (lp_t - prev_t))                      dL_t/dlp_u = dL_t/drho rho_i / n_i, all t, u
        on-policy  rho = exp(lp - sg(lp)), value 1, nothing clipped         dL/dlp = -A
        CISPO      L = -sg(clip(rho)) A lp                                  dL/dlp = -clip(rho) A
        REINFORCE  L = -A lp  (`disable_ppo_ratio`)                         dL/dlp = -A

        KL = kl_term(x, W), x = ref - lp       dKL/dlp = -dKL/dx + dKL/dW dW/dlp
        W  = exp(lp - sg(lp)), value 1         dW/dlp = 1     the score-function term
        W  = exp(lp - gen), not finite -> 0    dW/dlp = W     `use_on_policy_kl_approximation`
        W  = rho                               as rho above   `kl_importance_weight="policy_ratio"`
        W  = 1                                 dW/dlp = 0     `kl_importance_weight="none"`

    Args:
        config: Knobs by name; those not given have the values of `DEFAULTS`.
        logprobs: `[B, T]`, nats.
        batch: `advantages` `[B, T]` or `[B, 1]`, `token_mask` `[B, T]`, `sample_mask` `[B]`, and where known
            `prev_logprobs` (else `sg(lp)`), `generation_logprobs` (else prev), `reference_policy_logprobs`, and
            `policy_weights` `[B, T]` or `[B, 1]` (else 1).
        global_valid_toks: Z_tok.
        global_valid_seqs: Z_seq.
        frozen: `[B, T]`, the value of every `sg(lp)`. Finite differences move `logprobs` and keep this; by default it
            is `logprobs`.

    Returns:
        A `Result`. Its gradient is taken at `frozen = logprobs`.
    """
    config = {**DEFAULTS, **config}
    rows, width = logprobs.shape
    frozen = logprobs if frozen is None else frozen
    beta = 0.0 if config["use_kl_in_reward"] else config["reference_policy_kl_penalty"]
    by_row = config["sequence_level_importance_ratios"]
    low, high = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"]

    def read(key, i, tokens, otherwise):
        """The counted values of row i."""
        values = batch.get(key)
        if values is None:
            return otherwise
        return [float(values[i, t if values.shape[1] > 1 else 0]) for t in tokens]

    terms, kl_terms, margins = [], [], [math.inf]
    grad, grad_scale = np.zeros((rows, width)), np.zeros((rows, width))
    metrics = Metrics(config, global_valid_toks, global_valid_seqs)

    for i in range(rows):
        if batch["sample_mask"][i] == 0:
            continue
        tokens = [t for t in range(width) if batch["token_mask"][i, t] != 0]
        n = len(tokens)
        lp = [float(logprobs[i, t]) for t in tokens]
        sg_lp = [float(frozen[i, t]) for t in tokens]
        prev = sg_lp if config["force_on_policy_ratio"] else read("prev_logprobs", i, tokens, sg_lp)
        gen = read("generation_logprobs", i, tokens, prev)
        ref = read("reference_policy_logprobs", i, tokens, None)
        A = read("advantages", i, tokens, None)
        v = read("policy_weights", i, tokens, [1.0] * n)

        w, outside = actor_weights(prev, gen, config)
        metrics.row(w, outside, n)
        if n == 0:
            continue
        if not config["use_importance_sampling_correction"]:
            w = [1.0] * n
        elif by_row:
            w = w * n
        share = 1 / global_valid_toks if config["token_level_loss"] else 1 / (n * global_valid_seqs)

        # rho_t and the list of d rho_t / d lp_u; rho once more with every lp frozen.
        def ratios(lp, prev=prev, n=n):
            x = [p - q for p, q in zip(lp, prev, strict=True)]
            if by_row:
                x = [math.fsum(x) / n] * n
            out = []
            for t in range(n):
                rho, drho = policy_ratio(x[t])
                out.append((rho, [drho / n] * n if by_row else [drho if u == t else 0.0 for u in range(n)]))
            return out

        for t, ((rho, drho), (sg_rho, _)) in enumerate(zip(ratios(lp), ratios(sg_lp), strict=True)):
            only_t = [1.0 if u == t else 0.0 for u in range(n)]

            # The policy term and its derivative in every lp_u of the row.
            if config["disable_ppo_ratio"]:
                L, dL = -A[t] * lp[t], [-A[t] * e for e in only_t]
            elif config["use_cispo"]:
                weight, _ = clip(sg_rho, low, high)
                L, dL = -weight * A[t] * lp[t], [-weight * A[t] * e for e in only_t]
            else:
                L, slope = clipped_surrogate(A[t], rho, config)
                dL = [slope * d for d in drho]
                margins += [abs(rho - kink) for kink in (low, high, config["ratio_clip_c"]) if kink is not None]
                margins += [abs(math.log(rho) - LARGEST_LOG_RATIO)] if rho else []
            terms.append(w[t] * v[t] * L * share)
            dtotal = [[w[t] * v[t] * d * share] for d in dL]

            # The KL term likewise.
            if beta != 0:
                x = ref[t] - lp[t]
                if config["use_on_policy_kl_approximation"]:
                    W, sg_W = finite_exp(lp[t] - gen[t]), finite_exp(sg_lp[t] - gen[t])
                    dW = [W * e for e in only_t]
                elif config["kl_importance_weight"] == "policy_ratio":
                    W, sg_W, dW = rho, sg_rho, drho
                elif config["kl_importance_weight"] == "score_function":
                    W, sg_W, dW = exp(lp[t] - sg_lp[t]), 1.0, only_t
                else:
                    W, sg_W, dW = 1.0, 1.0, [0.0] * n
                bound_in, bound_out = config["kl_input_clamp_value"], config["kl_output_clamp_value"]
                if bound_in is not None:
                    W = sg_W if abs(x) > bound_in else W
                    margins.append(abs(abs(x) - bound_in))
                KL, dKL_dx, dKL_dW = kl_term(x, W, config)
                if bound_out is not None:
                    unclamped, _, _ = kl_term(x, W, {**config, "kl_output_clamp_value": None})
                    margins.append(abs(abs(unclamped) - bound_out))
                kl_terms.append(KL * share)
                metrics.add("kl", KL / global_valid_toks)
                for u in range(n):
                    dtotal[u] += [-beta * dKL_dx * only_t[u] * share, beta * dKL_dW * dW[u] * share]

            for u in range(n):
                grad[i, tokens[u]] += math.fsum(dtotal[u])
                grad_scale[i, tokens[u]] += math.fsum(abs(d) for d in dtotal[u])
            metrics.token(lp[t], prev[t], gen[t], A[t], rho)

    metrics.add("kl_penalty", *kl_terms)
    values, scales = metrics.result()
    loss = math.fsum(terms) + beta * math.fsum(kl_terms)
    loss_scale = math.fsum(map(abs, terms)) + beta * math.fsum(map(abs, kl_terms))
    return Result(loss, grad, values, loss_scale, grad_scale, scales, min(margins))


# --------------------------------------------------------------------------------------------------------------------
# The metrics
# --------------------------------------------------------------------------------------------------------------------


class Metrics:
    """The metrics, gathered token by token. Means divide by the counts of the whole step, as the loss does.

    probs_ratio                rho (REINFORCE: lp), with its smallest and largest value
    probs_ratio_clamped        rho inside the clip range, likewise
    clip_fraction_low          A < 0 and rho below the range;  _high: A > 0 and rho above it
    token_mult_prob_error      exp|gen - prev|
    gen_kl_error               k(prev - gen), an estimate of KL(gen || prev)
    policy_kl_error            k(gen - prev), the two swapped
    js_divergence_error        (k3(prev - mix) + k3(gen - mix)) / 2, mix = log(e^prev / 2 + e^gen / 2)
    approx_entropy             -exp(lp - gen) lp, 0 where that is not finite
    sampling_importance_ratio  the actor weight after truncation (sequence ratios: mean over rows)
    is_oob_ratio               tokens whose weight is out of bounds (seq-mask-tis: rows)
    kl_penalty                 the KL term without beta
    num_valid_samples          rows with sample_mask 1
    """

    def __init__(self, config, toks, seqs):
        """Start from nothing."""
        self.config, self.toks, self.seqs = config, toks, seqs
        self.ratios, self.clamped = [], []
        self.terms = {}
        sums = "probs_ratio probs_ratio_clamped clip_fraction_low clip_fraction_high token_mult_prob_error gen_kl_error"
        sums += " policy_kl_error js_divergence_error approx_entropy sampling_importance_ratio kl_penalty kl"
        for name in [*sums.split(), "num_valid_samples"]:
            self.add(name)
        if config["truncated_importance_sampling_type"] is not None:
            self.add("is_oob_ratio")

    def add(self, name, *values):
        """More terms of a sum."""
        self.terms.setdefault(name, []).extend(values)

    def row(self, weights, outside, n):
        """A row that counts, with one weight a token or one in all."""
        self.add("num_valid_samples", 1.0)
        by_row = self.config["sequence_level_importance_ratios"]
        self.add("sampling_importance_ratio", *(w / (self.seqs if by_row else self.toks) for w in weights))
        kind = self.config["truncated_importance_sampling_type"]
        if kind == "seq-mask-tis":
            # A row without a token has the mean 0, the ratio 1.
            bounds = (
                self.config["truncated_importance_sampling_ratio_min"],
                self.config["truncated_importance_sampling_ratio"],
            )
            out = outside[0] if outside else not bounds[0] <= 1 <= bounds[1]
            self.add("is_oob_ratio", out / self.seqs)
        elif kind is not None and n:
            self.add("is_oob_ratio", (n * outside[0] if by_row else sum(outside)) / self.toks)

    def token(self, lp, prev, gen, A, rho):
        """A token that counts."""
        Z, kind, config = self.toks, self.config["reference_policy_kl_type"], self.config
        low, high = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"]
        clipped = rho
        if config["disable_ppo_ratio"]:
            rho = clipped = lp
        elif not config["force_on_policy_ratio"]:
            clipped, _ = clip(rho, low, high)
            self.add("clip_fraction_low", (rho < low and (A < 0 or config["use_cispo"])) / Z)
            self.add("clip_fraction_high", (rho > high and (A > 0 or config["use_cispo"])) / Z)
        self.ratios.append(rho)
        self.clamped.append(clipped)
        self.add("probs_ratio", rho / Z)
        self.add("probs_ratio_clamped", clipped / Z)
        gen = gen if math.isfinite(gen) else prev
        self.add("token_mult_prob_error", exp(abs(gen - prev)) / Z)
        self.add("gen_kl_error", kl_estimate(prev - gen, kind)[0] / Z)
        self.add("policy_kl_error", kl_estimate(gen - prev, kind)[0] / Z)
        top = max(prev, gen)
        mix = top + math.log(0.5 * exp(prev - top) + 0.5 * exp(gen - top))
        self.add("js_divergence_error", (kl_estimate(prev - mix, "k3")[0] + kl_estimate(gen - mix, "k3")[0]) / 2 / Z)
        self.add("approx_entropy", -finite_exp(lp - gen) * lp / Z)

    def result(self):
        """Values by name, and the sums of absolute terms."""
        values = {name: math.fsum(terms) for name, terms in self.terms.items()}
        scales = {name: math.fsum(map(abs, terms)) for name, terms in self.terms.items()}
        for name, seen in (("probs_ratio", self.ratios), ("probs_ratio_clamped", self.clamped)):
            values[name + "_min"] = min(seen, default=math.inf)
            values[name + "_max"] = max(seen, default=-math.inf)
            scales[name + "_min"], scales[name + "_max"] = abs(values[name + "_min"]), abs(values[name + "_max"])
        return values, scales

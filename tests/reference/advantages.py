"""The advantage estimators in loops.

    GRPO                            arXiv:2402.03300, section 4.1.2
    leave-one-out baseline (RLOO)   arXiv:2402.14740
    GDPO                            arXiv:2601.05242
    REINFORCE++                     arXiv:2501.03262

A reward table maps a component's name to a list of N numbers; None or NaN is "does not apply". `mask` is `[N, T]`: a
row without a counted token is masked out.

Choices that no paper makes, shared with the package:
- a row that is masked out or whose components are all absent neither votes nor gets an advantage: it is exactly 0;
- values that are all equal have their own value as mean and 0 as spread, exactly; totals of K > 1 components count as
  equal within K eps max|w_k r_ik| of their group, and an advantage within that of its row is 0;
- the whitening of GDPO takes a mean, or a spread, within rounding error as 0 (see `gdpo`);
- the KL of a token in the reward has the clamps of the loss (see `token_kl`).
"""

import math

import numpy as np


def absent(x):
    """Whether a component does not apply to a row."""
    return x is None or math.isnan(x)


def group_advantages(values, groups, leave_one_out, normalize, residue=None):
    """A_i = (r_i - b_i) / (std_i + 1e-6) within the group of i, over the values that are not None.

    leave one out: b_i and std_i (unbiased) of the others of the group; else of the whole group.
    Undivided when the values under the std are all the same, or fewer than two. One value in the group: 0.
    `residue`: per value, how far rounding can have moved it.
    """
    residue = residue or [0.0] * len(values)
    out = []
    for i in range(len(values)):
        if values[i] is None:
            out.append(0.0)
            continue
        group = [j for j in range(len(values)) if groups[j] == groups[i] and values[j] is not None]
        if len(group) == 1:
            out.append(0.0)
            continue
        voters = [values[j] for j in group if not (leave_one_out and j == i)]
        equal = max(voters) - min(voters) <= max(residue[j] for j in group)
        A = values[i] - (max(voters) if equal else mean(voters))
        if abs(A) <= residue[i]:
            A = 0.0
        if normalize and not equal:
            A = A / (math.sqrt(variance(voters, 1)) + 1e-6)
        out.append(A)
    return out


def mean(values):
    """Sum over count; exactly their value where all are equal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def variance(values, ddof):
    """Two passes: sum (x - mean)^2 / (n - ddof)."""
    m = mean(values)
    return math.fsum((x - m) ** 2 for x in values) / (len(values) - ddof)


def counted_rows(rewards, mask):
    """Rows with a counted token and at least one component."""
    return [
        any(m != 0 for m in mask[i]) and any(not absent(rewards[name][i]) for name in rewards) for i in range(len(mask))
    ]


def total_rewards(rewards, weights, counted):
    """r_i = sum_k w_k r_ik over the components present; None for a row that does not count."""
    totals = []
    for i in range(len(counted)):
        present = [name for name in rewards if not absent(rewards[name][i])]
        totals.append(math.fsum(weights[name] * rewards[name][i] for name in present) if counted[i] else None)
    return totals


def rounding(rewards, weights):
    """K eps max_k |w_k r_ik| for each row; 0 for one component, which nothing was added to."""
    if len(rewards) == 1:
        return [0.0] * len(next(iter(rewards.values())))
    rows = zip(*([abs(weights[n] * r) if not absent(r) else 0.0 for r in rewards[n]] for n in rewards), strict=True)
    return [len(rewards) * np.finfo(np.float64).eps * max(row) for row in rows]


def clamp(x, low, high):
    """Last step of every estimator; None is no bound."""
    if low is not None and x < low:
        return low
    if high is not None and x > high:
        return high
    return x


def token_kl(policy, reference, kind, clamp_in, clamp_out):
    """k1, k2 or k3 of one token with x = reference - policy, clamped before and after."""
    x = reference - policy
    if clamp_in is not None:
        x = min(max(x, -clamp_in), clamp_in)
    k = {"k1": lambda: -x, "k2": lambda: x * x / 2, "k3": lambda: math.exp(x) - 1 - x}[kind]()
    if clamp_out is not None:
        k = min(max(k, -clamp_out), clamp_out)
    return k


def grpo(groups, rewards, mask, weights, *, leave_one_out=True, normalize=True, low=None, high=None, kl=None, beta=0.0):
    """r_i = sum_k w_k r_ik - beta sum_t kl_it, then `group_advantages`. Returns `[N]`.

    Source: arXiv:2402.03300; without the division and with leave-one-out it is RLOO, arXiv:2402.14740.
    """
    counted = counted_rows(rewards, mask)
    totals = total_rewards(rewards, weights, counted)
    if kl is not None:
        for i in range(len(totals)):
            if totals[i] is not None:
                totals[i] -= beta * math.fsum(kl[i][t] for t in range(len(mask[i])) if mask[i][t] != 0)
    A = group_advantages(totals, groups, leave_one_out, normalize, rounding(rewards, weights))
    return np.array([clamp(A[i], low, high) if counted[i] else 0.0 for i in range(len(A))])


def gdpo(groups, rewards, mask, weights, *, leave_one_out=True, normalize=True, low=None, high=None):
    """A_ik per component, A_i = sum_k w_k A_ik, whitened over the counted rows of the batch. Returns `[N]`.

    (A_i - mean) / std, unbiased, if std > 0. Deliberate: a mean, or a spread max - min, within 16 K eps max|w_k A_ik|
    is the rounding error of the sum and counts as 0.
    """
    counted = counted_rows(rewards, mask)
    parts = []
    for name in rewards:
        values = [None if absent(rewards[name][i]) or not counted[i] else rewards[name][i] for i in range(len(counted))]
        parts.append([weights[name] * a for a in group_advantages(values, groups, leave_one_out, normalize)])
    A = [math.fsum(part[i] for part in parts) for i in range(len(counted))]
    valid = [A[i] for i in range(len(A)) if counted[i]]
    if valid:
        residue = 16 * len(parts) * np.finfo(np.float64).eps * max(abs(a) for part in parts for a in part)
        m = mean(valid)
        m = 0.0 if abs(m) <= residue else m
        spread = max(valid) - min(valid)
        A = [(a - m) / math.sqrt(variance(valid, 1)) if spread > residue else 0.0 for a in A]
    return np.array([clamp(A[i], low, high) if counted[i] else 0.0 for i in range(len(A))])


def reinforce_plus_plus(groups, rewards, mask, weights, *, minus_baseline=True, low=None, high=None, kl=None, beta=0.0):
    """A_it = r_i - mean of the group - beta kl_it, whitened over the counted tokens of the batch. Returns `[N, T]`.

    (A - mean) / sqrt(max(var, 1e-8)) with the biased variance. NaN where a position of a counted row does not count:
    it has no value.

    Source: arXiv:2501.03262.
    """
    counted = counted_rows(rewards, mask)
    totals = total_rewards(rewards, weights, counted)
    if minus_baseline:
        relative = group_advantages(totals, groups, False, False, rounding(rewards, weights))
    A = {}
    for i in range(len(mask)):
        if not counted[i]:
            continue
        for t in range(len(mask[i])):
            if mask[i][t] != 0:
                A[i, t] = relative[i] if minus_baseline else totals[i]
                if kl is not None:
                    A[i, t] -= beta * kl[i][t]
    out = np.full(np.shape(mask), math.nan)
    for i in range(len(mask)):
        if not counted[i]:
            out[i, :] = 0.0
    if A:
        m, scale = mean(list(A.values())), 1 / math.sqrt(max(variance(list(A.values()), 0), 1e-8))
        for (i, t), a in A.items():
            out[i, t] = clamp((a - m) * scale, low, high)
    return out

"""The entropy bonus and its adaptive coefficient."""

from __future__ import annotations


def adapted_entropy_coef(
    coef: float, entropy: float, *, target: float, step: float, lowest: float, highest: float
) -> float:
    """The next coefficient of the entropy bonus: up by `step` while the entropy is at or below its target, else down.

    Args:
        coef: the current coefficient.
        entropy: the mean entropy of a token over the optimizer step, nats.
        target: the entropy to hold, nats.
        step: how far the coefficient moves.
        lowest: its lower bound.
        highest: its upper bound.

    Source:
        Skywork-OR1, arXiv:2505.22312.

    Example:
        >>> adapted_entropy_coef(0.0, 0.1, target=0.2, step=0.005, lowest=0.0, highest=1.0)
        0.005
    """
    moved = coef + step if entropy <= target else coef - step
    return min(max(moved, lowest), highest)

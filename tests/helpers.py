"""Short ways to call the estimators and the loss in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossConfig, ClippedPGLossFn, get_advantage_estimator

NAN = float("nan")


def advantages(
    name: str,
    rewards: dict[str, list[Any]] | list[Any],
    group_ids: list[int] | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    loss: dict[str, Any] | None = None,
    extras: dict[str, Any] | None = None,
    **config: Any,
) -> Tensor:
    """Advantages of one generation batch; a list of rewards is one component, one group by default."""
    components = rewards if isinstance(rewards, dict) else {"reward": rewards}
    columns = {
        key: torch.tensor([NAN if value is None else value for value in column], dtype=dtype)
        for key, column in components.items()
    }
    count = len(next(iter(columns.values())))
    estimator = get_advantage_estimator(AdvEstimatorConfig(name=name, **config), ClippedPGLossConfig(**(loss or {})))
    return estimator.compute_advantage(
        torch.tensor(group_ids or [0] * count),
        columns,
        torch.ones(count, 1) if mask is None else mask,
        **(extras or {}),
    )


def loss_and_grad(
    logprobs: Any,
    advantage: Any,
    mask: Any = None,
    sample_mask: Any = None,
    toks: float | None = None,
    seqs: float | None = None,
    dtype: torch.dtype = torch.float64,
    batch: dict[str, Any] | None = None,
    **knobs: Any,
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Loss, gradient and metrics of one micro-batch that is the whole step; no KL unless a penalty is named."""
    lp = torch.as_tensor(logprobs, dtype=dtype).clone().requires_grad_()
    token_mask = torch.ones(lp.shape) if mask is None else torch.as_tensor(mask)
    rows = torch.ones(lp.shape[0]) if sample_mask is None else torch.as_tensor(sample_mask)
    counted = token_mask.bool() & rows.bool()[:, None]
    inputs = {key: torch.as_tensor(value, dtype=dtype) for key, value in (batch or {}).items()}
    inputs |= {
        "advantages": torch.as_tensor(advantage, dtype=dtype),
        "token_mask": token_mask,
        "sample_mask": rows,
    }
    loss, metrics = ClippedPGLossFn(ClippedPGLossConfig(**({"reference_policy_kl_penalty": 0.0} | knobs)))(
        lp,
        inputs,
        global_valid_toks=counted.sum() if toks is None else toks,
        global_valid_seqs=rows.sum() if seqs is None else seqs,
    )
    loss.backward()
    return loss.item(), lp.grad, metrics

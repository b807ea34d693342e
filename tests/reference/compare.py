"""The package behind the signatures of the references, and one way to compare; the only module here that imports it."""

import numpy as np
import torch

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossConfig, ClippedPGLossFn, get_advantage_estimator

WORST = {}


def close(kind, got, want, scale, bound, where=""):
    """Asserts |got - want| <= bound * max(|want|, scale), the scale being what a rounding error is relative to."""
    got, want, scale = (np.asarray(x, dtype=float) for x in (got, want, scale))
    assert got.shape == want.shape
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(same, 0.0, np.abs(got - want) / np.maximum(np.abs(want), scale))
    worst = float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))
    if worst > WORST.get(kind, (-1.0, ""))[0]:
        WORST[kind] = (worst, where)
    assert worst <= bound, f"{kind} {where}: {got} is not {want}: relative difference {worst:.2e}"


def report_worst(request):
    """A module fixture that prints the largest difference of each kind when the module is done."""
    WORST.clear()
    yield
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\nworst relative differences seen:")
        for kind, (error, where) in sorted(WORST.items()):
            print(f"    {kind:28} {error:.1e} {where}")


def package_loss(knobs, case, dtype=torch.float64):
    """Loss, gradient `[B, T]` and metrics of the package, as NumPy numbers."""
    lp = torch.tensor(case.logprobs, dtype=dtype, requires_grad=True)
    batch = {key: torch.tensor(value, dtype=dtype) for key, value in case.batch.items()}
    loss, metrics = ClippedPGLossFn(ClippedPGLossConfig(**knobs))(
        lp, batch, global_valid_toks=case.toks, global_valid_seqs=case.seqs
    )
    loss.backward()
    return loss.item(), lp.grad.double().numpy(), {name: value.item() for name, value in metrics.items()}


def package_advantages(knobs, rewards, loss=None, dtype=torch.float64):
    """Advantages of the package, `[N]` or `[N, T]`; `loss` are the knobs of a KL in the reward."""
    extras = {"logprobs_policy": rewards.policy, "logprobs_reference": rewards.reference} if loss else {}
    estimator = get_advantage_estimator(AdvEstimatorConfig(**knobs), ClippedPGLossConfig(**(loss or {})))
    advantages = estimator.compute_advantage(
        torch.tensor(rewards.groups),
        {name: torch.tensor(column, dtype=dtype) for name, column in rewards.table.items()},
        torch.tensor(rewards.mask),
        reward_weights=rewards.weights,
        **{key: torch.tensor(value) for key, value in extras.items()},
    )
    return advantages.double().numpy()

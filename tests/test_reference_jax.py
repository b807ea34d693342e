"""The package and the slow reference against the same loss in JAX, whose gradients are `jax.grad`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from reference import loss_jax
from reference.compare import close, package_loss, report_worst
from reference.loss import reference_loss
from strategies import BASE, Case, cases, loss_knobs

jax = pytest.importorskip("jax", reason="the third road to the loss needs JAX: pip install hf_grpo_ext[parity]")

METHODS = ("ppo", "dual_clip", "gspo", "cispo", "reinforce", "on_policy")
KL_TYPES = ("k1", "k2", "k3")
KL_WEIGHTS = ("score_function", "policy_ratio", "none", "generation")
TRUNCATIONS = ("tis", "icepop", "seq-mask-tis")
SHAPE = (5, 7)

worst_differences = pytest.fixture(scope="module", autouse=True)(report_worst)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def padded(case: Case) -> Case:
    """The same case in one shape, so that JAX compiles each operation once. What is added is masked."""

    def pad(x: np.ndarray) -> np.ndarray:
        wide = (SHAPE[0] - x.shape[0], SHAPE[1] - x.shape[1] if x.ndim == 2 and x.shape[1] > 1 else 0)
        return np.pad(x, [(0, extra) for extra in wide[: x.ndim]])

    same = case.logprobs.shape[1] == 1  # [B, 1] is both a column of advantages and a whole row
    batch = {key: np.repeat(x, SHAPE[1], axis=1) if same and x.ndim == 2 else x for key, x in case.batch.items()}
    if same:
        batch["token_mask"] = batch["token_mask"] * (np.arange(SHAPE[1]) == 0)
    logprobs = np.repeat(case.logprobs, SHAPE[1], axis=1) if same else case.logprobs
    return Case(pad(logprobs), {key: pad(x) for key, x in batch.items()}, case.toks, case.seqs)


def compare(knobs: dict[str, Any], case: Case) -> None:
    case = padded(case)
    arguments = (knobs, case.logprobs, case.batch, case.toks, case.seqs)
    loops = reference_loss(*arguments)
    jax_loss, jax_grad = loss_jax.loss_and_grad(*arguments)
    loss, grad, _ = package_loss(knobs, case)
    for name, got_loss, got_grad in (("package", loss, grad), ("loops", loops.loss, loops.grad)):
        close(f"{name} to JAX, loss", got_loss, jax_loss, loops.loss_scale, 1e-10)
        close(f"{name} to JAX, gradient", got_grad, jax_grad, loops.grad_scale, 1e-10)


@settings(BASE, max_examples=60)
@given(loss_knobs(), cases())
def test_every_knob(knobs: dict[str, Any], case: Case) -> None:
    compare(knobs, case)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("kl_weight", KL_WEIGHTS)
def test_every_kl_of_every_method(method: str, kl_type: str, kl_weight: str) -> None:
    on_policy = kl_weight == "generation"
    knobs = loss_knobs(
        method,
        reference_policy_kl_penalty=0.3,
        reference_policy_kl_type=kl_type,
        use_on_policy_kl_approximation=on_policy,
        kl_importance_weight="score_function" if on_policy else kl_weight,
        use_kl_in_reward=False,
    )

    @settings(BASE, max_examples=4)
    @given(knobs, cases(rows=SHAPE[:1] * 2, tokens=SHAPE[1:] * 2, masks=("holes",)))
    def run(knobs: dict[str, Any], case: Case) -> None:
        compare(knobs, case)

    run()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", TRUNCATIONS)
def test_every_truncation_of_every_method(method: str, kind: str) -> None:
    knobs = loss_knobs(
        method,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=1.2,
        truncated_importance_sampling_ratio_min=0.7,
    )

    @settings(BASE, max_examples=4)
    @given(knobs, cases(rows=SHAPE[:1] * 2, tokens=SHAPE[1:] * 2, masks=("holes",)))
    def run(knobs: dict[str, Any], case: Case) -> None:
        compare(knobs, case)

    run()


@pytest.mark.slow
@settings(BASE, max_examples=3000)
@given(loss_knobs(), cases())
def test_every_knob_at_length(knobs: dict[str, Any], case: Case) -> None:
    compare(knobs, case)

"""A stale policy samples, and the importance correction brings the gradient back to the on-policy one.

First on policies that are tables of logits, where an expectation is a sum over all actions: exact, no draws. Then end
to end, where a rollout function answers with the log-probabilities of a stale model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_model
from tiny_env import (
    CENTRED,
    by_completion,
    check_gradient,
    constant,
    flat,
    geometric_mean,
    given_completion,
    inside,
    logged,
    make_trainer,
    on_policy_loss,
    padded,
    quiet,
    rows_of,
    token_logprobs,
    trainable,
    trained,
    truncation,
    weights_of,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_grpo_ext import ClippedPGLossConfig, ClippedPGLossFn, GRPOExtTrainer

pytestmark = quiet
CORRECTED = {"use_importance_sampling_correction": True}

# One state, four actions, and the three policies of an off-policy step.
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)
STALE = torch.tensor([-0.5, 1.0, -1.0, 0.5], dtype=torch.float64)  # it sampled
SCORED = torch.tensor([0.5, -0.3, 0.2, 0.0], dtype=torch.float64)  # it was trained when the rollouts came back
MOVED = torch.tensor([0.7, -0.5, 0.3, -0.2], dtype=torch.float64)  # it is one update further


def loss_of(logprobs: Tensor, prev: Tensor, generation: Tensor, advantage: Tensor, **knobs: Any) -> Tensor:
    """The loss of one row alone, `[1, T]` log-probabilities."""
    batch = {
        "advantages": advantage.view(1, 1),
        "token_mask": torch.ones(logprobs.shape),
        "sample_mask": torch.ones(1),
        "prev_logprobs": prev.detach(),
        "generation_logprobs": generation.detach(),
    }
    config = ClippedPGLossConfig(**{"reference_policy_kl_penalty": 0.0} | knobs)
    tokens = logprobs.shape[1]
    return ClippedPGLossFn(config)(logprobs, batch, global_valid_toks=tokens, global_valid_seqs=1)[0]


def expected_gradient(now: Tensor, prev: Tensor, **knobs: Any) -> Tensor:
    """E[gradient of the loss] at the policy `now`, over actions that the stale policy draws."""
    now = now.clone().requires_grad_()
    lp, old, behaviour = (logits.log_softmax(-1)[:, None, None] for logits in (now, prev, STALE))
    loss = sum(
        behaviour[a].exp() * loss_of(lp[a], old[a], behaviour[a], ADVANTAGES[a], **knobs)
        for a in range(len(ADVANTAGES))
    )
    return torch.autograd.grad(loss.sum(), now)[0]


def on_policy_gradient(now: Tensor) -> Tensor:
    """The gradient of -E[A], over actions that the policy `now` itself draws."""
    now = now.clone().requires_grad_()
    return torch.autograd.grad(-(now.softmax(-1) * ADVANTAGES).sum(), now)[0]


def off(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"ratio_clip_c": 3.0},
        {"force_on_policy_ratio": True},
        {"disable_ppo_ratio": True},
        {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 4.0},
        {"token_level_loss": False},
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
    ],
    ids=["ppo", "dual clip", "on-policy ratio", "reinforce", "cispo", "sequence mean", "gspo"],
)
def test_the_correction_gives_the_on_policy_gradient(knobs: dict[str, Any]) -> None:
    exact = on_policy_gradient(SCORED)
    assert off(expected_gradient(SCORED, SCORED, **CORRECTED, **knobs), exact) < 1e-12
    assert off(expected_gradient(SCORED, SCORED, **knobs), exact) > 0.2, "without it the gradient is another"


def test_after_an_update_the_ratio_does_the_rest() -> None:
    # exp(lp - prev) * exp(prev - gen) = exp(lp - gen), where no clip bites.
    open_clip = {"ratio_clip_min": 1.0, "ratio_clip_max": 1e6}
    exact = on_policy_gradient(MOVED)
    assert off(expected_gradient(MOVED, SCORED, **CORRECTED, **open_clip), exact) < 1e-12
    assert off(expected_gradient(MOVED, SCORED, **open_clip), exact) > 0.2


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("tis", lambda w: w.clamp(0.5, 3.5)),
        ("icepop", lambda w: w * ((w >= 0.5) & (w <= 3.5))),
        ("seq-mask-tis", lambda w: w * ((w >= 0.5) & (w <= 3.5))),  # one token: its mean is itself
    ],
)
def test_truncation_trades_the_exact_expectation_for_bounded_weights(
    kind: str, weights: Callable[[Tensor], Tensor]
) -> None:
    knobs = {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": 3.5,
        "truncated_importance_sampling_ratio_min": 0.5,
    }
    found = expected_gradient(SCORED, SCORED, **CORRECTED, **knobs)
    # -sum_a gen(a) w(a) A(a) grad log pi(a), with the bounded weights
    now = SCORED.clone().requires_grad_()
    w = weights(SCORED.softmax(-1) / STALE.softmax(-1))
    expected = torch.autograd.grad(-(STALE.softmax(-1) * w * ADVANTAGES * now.log_softmax(-1)).sum(), now)[0]
    assert off(found, expected) < 1e-12
    assert off(found, on_policy_gradient(SCORED)) > 0.01


# Two tokens: the first out of three, the second out of three whose odds depend on the first.


def test_a_sequence_needs_one_weight_a_row() -> None:
    generator = torch.Generator().manual_seed(0)

    def table(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    now, advantages = (table(3), table(3, 3)), table(3, 3)
    stale = tuple(logits + table(*logits.shape) / 2 for logits in now)
    for logits in now:
        logits.requires_grad_()

    def row(policy: tuple[Tensor, ...], a: int, b: int) -> Tensor:
        return torch.stack([policy[0].log_softmax(-1)[a], policy[1].log_softmax(-1)[a, b]])[None]

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, now)])

    def expected(**knobs: Any) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for a, b in itertools.product(range(3), repeat=2):
            lp, gen = row(now, a, b), row(stale, a, b)
            loss = loss + gen.sum().exp() * loss_of(lp, lp, gen, advantages[a, b], **knobs)
        return gradient(loss)

    # The losses are means over the two tokens.
    exact = gradient(-sum(row(now, a, b).sum().exp() * advantages[a, b] for a in range(3) for b in range(3)) / 2)
    sequence = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    assert off(expected(**sequence, **CORRECTED), exact) < 1e-12
    # A weight a token corrects the token, not what the stale policy wrote before it or after it.
    assert 0.1 < off(expected(**CORRECTED), exact) < off(expected(), exact)


# End to end


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


def stale_copy(tiny_model: str) -> Any:
    """The policy as it was a while ago: other weights in the last layer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.add_(0.1 * torch.randn_like(model.lm_head.weight))
    return model.eval()


def sampled_by(model: Any) -> Callable[..., dict[str, Any]]:
    """A rollout function: the given completions, with the log-probabilities that `model` gave them."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        ids = [given_completion(prompt, row % 4, 7) for row, prompt in enumerate(prompt_ids)]
        with torch.no_grad():
            logprobs = token_logprobs(model, padded(prompt_ids, ids))[0]
        lists = [values[: len(row)].tolist() for values, row in zip(logprobs, ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": lists}

    return rollout


def token_weight(log_weight: Tensor, mask: Tensor) -> Tensor:
    return log_weight.exp()


SEQUENCE = {"token_level_loss": False, "sequence_level_importance_ratios": True}
# The knobs, and the weight of each token (or row) by hand from log w = prev - gen.
WEIGHTS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "none": ({}, token_weight),
    "tis": (truncation("tis", 0.0, 1.2), lambda x, m: x.exp().clamp(0, 1.2)),
    "icepop": (truncation("icepop", 0.8, 1.2), lambda x, m: x.exp() * inside(x.exp(), 0.8, 1.2)),
    "seq-mask-tis": (
        truncation("seq-mask-tis", 0.9, 1.2),
        lambda x, m: x.exp() * inside(geometric_mean(x, m), 0.9, 1.2),
    ),
    "gspo": (SEQUENCE, lambda x, m: (x * m).sum(1, keepdim=True).exp()),
    "gspo, tis": (
        SEQUENCE | truncation("tis", 0.0, 1.2),
        lambda x, m: (x * m).sum(1, keepdim=True).exp().clamp(0, 1.2),
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_the_loss_weighs_by_trainer_over_engine(tiny_model: str, tmp_path: Path, case: str) -> None:
    knobs, weight = WEIGHTS[case]
    stale = stale_copy(tiny_model)
    trainer = trained(
        tiny_model,
        tmp_path,
        by_completion,
        trainer={"rollout_func": sampled_by(stale)},
        loss_fn=CORRECTED | {"ratio_clip_min": 0.5, "ratio_clip_max": 0.5} | knobs,
        num_iterations=2,  # in the second step the ratio is not 1, and `prev` is of the weights before the first
        max_steps=2,
        learning_rate=0.1,
    )
    log_weights, ratios = [], []

    def loss(step: int) -> Callable[[Any], Tensor]:
        (batch,) = rows_of(trainer, step)
        mask = batch["completion_mask"]
        with torch.no_grad():
            gen = token_logprobs(stale, batch)[0]
            with weights_of(trainer, 0) as before:
                prev = token_logprobs(before, batch)[0]
        log_weights.append((prev - gen)[mask.bool()])
        w, a = weight((prev - gen) * mask, mask), batch["advantages"][:, None]

        def of(model: Any) -> Tensor:
            log_ratio = (token_logprobs(model, batch)[0] - prev) * mask
            if "gspo" in case:
                log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
            ratio = log_ratio.exp()
            ratios.append(ratio.detach())
            token_loss = w * torch.maximum(-a * ratio, -a * ratio.clamp(0.5, 1.5))
            if "gspo" in case:
                return (token_loss.squeeze(1)).mean()
            return (token_loss * mask).sum() / mask.sum()

        return of

    for step in (0, 1):
        check_gradient(trainer, loss(step), step=step)
    assert log_weights[0].abs().amax() > 0.2, "the stale policy is another"
    assert (ratios[-1] - 1).abs().amax() > 1e-3, "the policy has moved"
    shares = logged(trainer, "is_oob_ratio")
    assert all(0 < share < 1 for share in shares), "some weights are out of bounds and some are not"
    assert bool(shares) == ("truncated_importance_sampling_type" in knobs)


def test_the_metrics_of_the_weights_are_theirs(tiny_model: str, tmp_path: Path) -> None:
    stale = stale_copy(tiny_model)
    trainer = trained(
        tiny_model,
        tmp_path,
        by_completion,
        trainer={"rollout_func": sampled_by(stale)},
        loss_fn=CORRECTED | truncation("icepop", 0.8, 1.2),
    )
    (batch,) = rows_of(trainer)
    mask = batch["completion_mask"].bool()
    with torch.no_grad(), weights_of(trainer, 0) as model:
        w = (token_logprobs(model, batch)[0] - token_logprobs(stale, batch)[0])[mask].exp()
    kept = inside(w, 0.8, 1.2)
    assert logged(trainer, "is_oob_ratio") == pytest.approx([1 - kept.mean().item()])
    assert logged(trainer, "sampling_importance_ratio") == pytest.approx([(w * kept).mean().item()], rel=1e-4)
    assert logged(trainer, "token_mult_prob_error") == pytest.approx([torch.maximum(w, 1 / w).mean().item()], rel=1e-4)


@pytest.mark.parametrize("knob", ["use_importance_sampling_correction", "use_on_policy_kl_approximation"])
def test_a_rollout_function_without_log_probabilities(tiny_model: str, tmp_path: Path, knob: str) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        ids = [given_completion(prompt, row % 4, 7) for row, prompt in enumerate(prompt_ids)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    with pytest.raises(ValueError, match=r"no 'generation_logprobs'.*as `logprobs` from the rollout_func"):
        trained(
            tiny_model,
            tmp_path,
            by_completion,
            trainer={"rollout_func": rollout},
            loss_fn={knob: True, "reference_policy_kl_penalty": 0.1},
        )


@pytest.mark.parametrize("fields", [{"loss_fn": CORRECTED}, {"seq_logprob_error_threshold": 1.5}])
def test_trl_looks_at_the_log_probabilities_of_a_server(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """It does, and warns of raw ones, where its own correction is on; ours is not corrected twice."""
    seen = []

    def look(self: Any) -> None:
        seen.append(self.args.vllm_importance_sampling_correction)
        raise InterruptedError

    monkeypatch.setattr(GRPOExtTrainer, "create_accelerator_and_postprocess", look)
    with pytest.raises(InterruptedError):
        make_trainer(tiny_model, tmp_path, by_completion, trainer={"rollout_func": sampled_by(None)}, **fields)
    assert seen == [True]
    monkeypatch.undo()
    trainer = make_trainer(tiny_model, tmp_path, by_completion, trainer={"rollout_func": sampled_by(None)}, **fields)
    assert trainer.vllm_importance_sampling_correction is ("loss_fn" not in fields)


# Sampling from a part of the distribution


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 20, "min_p": 0.1}, "top_k=20, min_p=0.1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5"),
    ],
)
def test_a_correction_of_an_engine_that_cuts_warns_once(
    tiny_model: str, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.warns(UserWarning, match=f"{named} with an importance correction: the engine renormalises") as caught:
        make_trainer(
            tiny_model,
            tmp_path,
            by_completion,
            trainer={"rollout_func": sampled_by(None)},
            loss_fn=CORRECTED,
            **fields,
        )
    assert sum("renormalises" in str(warning.message) for warning in caught) == 1


@pytest.mark.filterwarnings("error:.*renormalises")
@pytest.mark.parametrize("fields", [{"loss_fn": CORRECTED}, {"top_p": 0.9}], ids=["nothing is cut", "no correction"])
def test_without_either_there_is_no_warning(tiny_model: str, tmp_path: Path, fields: dict[str, Any]) -> None:
    make_trainer(tiny_model, tmp_path, by_completion, trainer={"rollout_func": sampled_by(None)}, **fields)


def rows_shifted_by(shift: float, rows: set[int]) -> Callable[..., dict[str, Any]]:
    """The current policy generates, but reports wrong log-probabilities for some rows, alternately up and down."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        result = sampled_by(trainer.model)(prompts, trainer)
        for row in rows:
            result["logprobs"][row] = [x + shift * (-1) ** t for t, x in enumerate(result["logprobs"][row])]
        return result

    return rollout


def test_a_rollout_on_which_the_engines_disagree_neither_votes_nor_trains(tiny_model: str, tmp_path: Path) -> None:
    """Errors of +0.5 and -0.5 nats have the geometric mean 1 and the mean of exp|error| 1.65 (cases.md 22)."""
    rewards = [1.0, 0.0, 0.0, 4.0, 1.0, 0.0, 0.0, 9.0]
    trainer = trained(
        tiny_model,
        tmp_path,
        constant(rewards),
        trainer={"rollout_func": rows_shifted_by(0.5, {3, 7})},
        adv_estimator=CENTRED,
        seq_logprob_error_threshold=1.5,
    )
    (batch,) = trainer.scored
    assert batch["sample_mask"].tolist() == [True, True, True, False] * 2
    expected = [2 / 3, -1 / 3, -1 / 3, 0] * 2
    torch.testing.assert_close(batch["advantages"], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert logged(trainer, "seq_logprob_error/masked_rows") == [2]
    assert logged(trainer, "seq_logprob_error/before_max") == pytest.approx([math.exp(0.5)], rel=1e-4)
    assert logged(trainer, "seq_logprob_error/before_mean") == pytest.approx([(6 + 2 * math.exp(0.5)) / 8], rel=1e-4)
    for name in ("after_max", "after_mean", "after_min", "before_min"):
        assert logged(trainer, f"seq_logprob_error/{name}") == pytest.approx([1], rel=1e-4)
    assert logged(trainer, "num_valid_samples") == [6]
    (computed,) = rows_of(trainer)

    def loss(model: Any) -> Tensor:
        mask = computed["completion_mask"] * computed["sample_mask"][:, None]
        return on_policy_loss(computed, model, mask=mask) / mask.sum()

    check_gradient(trainer, loss)


@pytest.mark.parametrize("fields", [{}, {"loss_fn": {"force_on_policy_ratio": True}}])
def test_a_threshold_that_nothing_exceeds_changes_nothing(
    tiny_model: str, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Also with the ratio pinned to 1, where `prev` is needed for the threshold alone."""
    runs = [
        trained(
            tiny_model,
            tmp_path,
            by_completion,
            trainer={"rollout_func": rows_shifted_by(0.5, {3})},
            seq_logprob_error_threshold=threshold,
            **fields,
        )
        for threshold in (None, 2.0)
    ]
    plain, guarded = (flat(trainable(trainer.model)) for trainer in runs)
    torch.testing.assert_close(plain, guarded, rtol=0, atol=1e-6)
    assert logged(runs[1], "seq_logprob_error/masked_rows") == [0]


def test_a_threshold_needs_an_engine(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seq_logprob_error_threshold needs the log-probabilities of the engine"):
        make_trainer(tiny_model, tmp_path, by_completion, seq_logprob_error_threshold=1.5)

    def silent(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return sampled_by(trainer.model)(prompts, trainer) | {"logprobs": None}

    with pytest.raises(ValueError, match=r"threshold=1.5, but the rollouts carry no log-probabilities"):
        trained(
            tiny_model,
            tmp_path,
            by_completion,
            trainer={"rollout_func": silent},
            seq_logprob_error_threshold=1.5,
        )

"""What is not computed, and that nobody can tell from the gradient: prompts once, rows without signal not at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import make_tokenizer, save_tiny_model
from tiny_env import (
    CENTRED,
    PROMPTS,
    GivenRollouts,
    by_completion,
    constant,
    difference,
    flat,
    given_completion,
    logged,
    make_trainer,
    quiet,
    rows_of,
    token_logprobs,
    weights_of,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer

from hf_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from hf_grpo_ext.shared_prompt import draws_dropout

pytestmark = quiet

ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
# The first prompt's completions differ in their reward, the second's do not.
HALF = constant([1.0, 0, 0, 0, 1, 1, 1, 1])
NONE = constant([1.0] * 8)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


class Forwards:
    """The forwards of a trainer and its reference: their tokens, and whether those with a gradient were packed."""

    def __init__(self, trainer: Any) -> None:
        self.tokens: list[int] = []
        self.packed: list[bool] = []
        self.tokens_without_gradient: list[int] = []
        for model in (trainer.model, trainer.ref_model):
            if model is not None:
                base = model.get_base_model() if hasattr(model, "get_base_model") else model
                base.base_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"].numel()
        if torch.is_grad_enabled():
            self.tokens.append(tokens)
            self.packed.append(kwargs.get("packed") is not None)
        else:
            self.tokens_without_gradient.append(tokens)


def run(model: Any, folder: Path, reward: Any, *, prepare: Any = None, **args: Any) -> Any:
    """A trainer, trained, with its `forwards`; rows without signal are skipped unless an argument says otherwise."""
    if issubclass(args.get("cls", GRPOExtTrainer), GRPOExtTrainer):
        args = {"skip_rows_without_signal": True} | args
    trainer = make_trainer(model, folder, reward, **args)
    if prepare is not None:
        prepare(trainer)
    trainer.forwards = Forwards(trainer)
    trainer.train()
    return trainer


def rows(*batches: dict[str, Any]) -> list[tuple[int, ...]]:
    """The completions of micro-batches, without padding."""
    return sorted(
        tuple(ids[mask.bool()].tolist())
        for batch in batches
        for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    )


def with_signal(trainer: Any, step: int = 0) -> list[tuple[int, ...]]:
    scored = trainer.scored[step]
    kept = scored["advantages"] != 0
    return rows({key: scored[key][kept] for key in ("completion_ids", "completion_mask")})


# Rows without signal


def test_rows_without_signal_are_not_computed(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(tiny_model, tmp_path, HALF, **ACCUMULATED)
    kept = with_signal(trainer)
    assert len(kept) == 4
    assert rows(*trainer.trained) == kept
    # Two rows of one prompt in each micro-batch, whose prompt is computed once.
    assert [len(batch["completion_ids"]) for batch in trainer.trained] == [2, 2]
    prompt = int(trainer.scored[0]["prompt_mask"][0].sum())
    assert trainer.forwards.packed == [True, True]
    assert sum(trainer.forwards.tokens) == 2 * (prompt - 1) + sum(map(len, kept))


def test_without_packing_rows_without_signal_are_not_computed_either(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(tiny_model, tmp_path, HALF, shared_prompt_forward=False, **ACCUMULATED)
    lengths = sorted(map(len, with_signal(trainer)))
    prompt = int(trainer.scored[0]["prompt_mask"][0].sum())
    # By length, so that the short ones are not padded to the long ones.
    assert trainer.forwards.tokens == [2 * (prompt + lengths[1]), 2 * (prompt + lengths[3])]


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "sequence ratios": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "two iterations": {"num_iterations": 2, "max_steps": 2, "learning_rate": 1e-2},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_all_rows_and_of_trl(tiny_model: str, tmp_path: Path, loss: str) -> None:
    def build(**args: Any) -> Any:
        return run(tiny_model, tmp_path, HALF, **(ACCUMULATED | LOSSES[loss] | args))

    ours, every_row, stock = build(), build(skip_rows_without_signal=False), build(cls=GRPOTrainer)
    assert all(ours.forwards.packed)
    assert sum(ours.forwards.tokens) < sum(every_row.forwards.tokens) < sum(stock.forwards.tokens)
    assert len(ours.watch.gradients) == LOSSES[loss].get("max_steps", 1)
    for step, gradient in enumerate(ours.watch.gradients):
        assert gradient.norm() > 1e-3
        assert difference(gradient, every_row.watch.gradients[step]) < 1e-5
        assert difference(gradient, stock.watch.gradients[step]) < 1e-5


@pytest.mark.parametrize("term", [{"beta": 0.1}, {"entropy_coef": 0.1}])
def test_a_term_beside_the_policy_s_needs_every_row(tiny_model: str, tmp_path: Path, term: dict[str, float]) -> None:
    trainer = run(tiny_model, tmp_path, HALF, **ACCUMULATED, **term)
    assert len(rows(*trainer.trained)) == 8
    assert logged(trainer, "frac_rows_skipped") == [0.0]
    every_row = run(tiny_model, tmp_path, HALF, skip_rows_without_signal=False, **ACCUMULATED, **term)
    assert difference(trainer.watch.gradients[0], every_row.watch.gradients[0]) < 1e-6


def test_a_kl_that_is_in_the_reward_needs_no_row_without_an_advantage(tiny_model: str, tmp_path: Path) -> None:
    # The reference is the policy, so that the KL is 0 and the second group stays without signal.
    trainer = run(tiny_model, tmp_path, HALF, beta=0.1, loss_fn={"use_kl_in_reward": True}, **ACCUMULATED)
    assert rows(*trainer.trained) == with_signal(trainer)


def test_a_reward_that_varies_everywhere_skips_nothing(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(tiny_model, tmp_path, by_completion, **ACCUMULATED)
    assert len(rows(*trainer.trained)) == 8
    assert logged(trainer, "frac_rows_skipped") == [0.0]


def test_the_rows_that_were_skipped_are_logged(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(tiny_model, tmp_path, constant([1.0, 0, None, 0.5, 1, 1, 1, 1]), adv_estimator=CENTRED, **ACCUMULATED)
    # The row without a reward has no advantage; neither has the one at the mean of its group.
    assert trainer.scored[0]["advantages"].tolist() == [0.5, -0.5, 0, 0, 0, 0, 0, 0]
    assert logged(trainer, "frac_rows_skipped") == [0.75]
    assert logged(trainer, "num_valid_samples") == [8]


class TruncatesOne(GivenRollouts):
    truncated = staticmethod(lambda rank: rank == 0)


def test_rows_that_do_not_count_are_no_rows_that_were_skipped(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(
        tiny_model,
        tmp_path,
        constant([9.0, 1, 0, 0, 9, 1, 1, 1]),
        mixin=TruncatesOne,
        mask_truncated_completions=True,
        **ACCUMULATED,
    )
    assert logged(trainer, "num_valid_samples") == [6]
    assert logged(trainer, "frac_rows_skipped") == [0.5]
    assert len(rows(*trainer.trained)) == 3


class TruncatesAll(GivenRollouts):
    truncated = staticmethod(lambda rank: True)


def test_where_no_row_counts_none_was_skipped(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(
        tiny_model,
        tmp_path,
        by_completion,
        mixin=TruncatesAll,
        mask_truncated_completions=True,
        skip_rows_without_signal=False,
        **ACCUMULATED,
    )
    assert sum(len(batch["completion_ids"]) for batch in trainer.trained) == 8
    assert logged(trainer, "num_valid_samples") == [0]
    assert logged(trainer, "frac_rows_skipped") == [0.0]


def test_metrics_are_averaged_over_the_rows_that_were_computed(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(
        tiny_model, tmp_path, HALF, num_iterations=2, max_steps=2, learning_rate=0.05, epsilon=0.1, **ACCUMULATED
    )
    batches = rows_of(trainer, step=1, accumulation=2)
    tokens = sum(b["completion_mask"].sum().item() for b in batches)
    ratio, clipped, entropy = 0.0, 0.0, 0.0
    with weights_of(trainer, 0) as model, torch.no_grad():
        before = [token_logprobs(model, b)[0] for b in batches]
    with weights_of(trainer, 1) as model, torch.no_grad():
        for batch, prev in zip(batches, before, strict=True):
            mask = batch["completion_mask"].bool()
            logps, entropies = token_logprobs(model, batch)
            ratios = (logps - prev).exp()[mask]
            ratio += ratios.sum().item() / tokens
            clipped += ratios.clamp(0.9, 1.1).sum().item() / tokens
            entropy += entropies[mask].sum().item() / tokens
    assert abs(ratio - 1) > 1e-2  # or any average would do
    assert logged(trainer, "probs_ratio") == pytest.approx([1, ratio], rel=1e-4)
    assert logged(trainer, "probs_ratio_clamped")[1] == pytest.approx(clipped, rel=1e-4)
    assert logged(trainer, "entropy")[1] == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize(
    "layout", [{}, ACCUMULATED, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}]
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_step_without_any_signal_moves_nothing(
    tiny_model: str, tmp_path: Path, layout: dict[str, int], shared: bool
) -> None:
    trainer = run(tiny_model, tmp_path, NONE, shared_prompt_forward=shared, **layout)
    # Every process takes part in as many backwards as ever, with one row each.
    assert len(trainer.trained) == layout.get("gradient_accumulation_steps", 1)
    assert all(len(batch["completion_ids"]) == 1 for batch in trainer.trained)
    assert trainer.watch.gradients[0].abs().max() == 0
    assert torch.equal(flat(trainer.model.parameters()), flat(trainer.watch.weights[0].values()))
    (entry,) = trainer.state.log_history[:1]
    assert entry["loss"] == 0
    assert all(math.isfinite(value) for value in entry.values() if value is not None)
    assert entry["frac_rows_skipped"] == 1  # the row for company does not count


def test_signal_that_comes_late_trains_after_a_step_without(tiny_model: str, tmp_path: Path) -> None:
    answers = iter([[1.0] * 8, [1.0, 0, 0, 0, 1, 1, 1, 1]])
    trainer = run(tiny_model, tmp_path, lambda **_: next(answers), max_steps=2, **ACCUMULATED)
    first, second = trainer.watch.gradients
    assert first.abs().max() == 0
    assert second.norm() > 1e-3
    assert logged(trainer, "frac_rows_skipped") == [1, 0.5]


# Prompts computed once: when, and when not


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return save_tiny_model(tmp_path_factory.mktemp("windowed"), vocab_size=64, **window)


@pytest.fixture(scope="module")
def dropout_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("dropout"), vocab_size=64, attention_dropout=0.1)


EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window": (
        "windowed_model",
        {},
        r"Qwen2ForCausalLM has layers that are not full attention \(sliding_attention\)",
    ),
    "eager attention": ("tiny_model", EAGER, r"attn_implementation is 'eager', not 'sdpa' or a flash_attention"),
    "dropout": ("dropout_model", {}, r"the model has dropout"),
    "widths that are multiples": ("tiny_model", {"pad_to_multiple_of": 8}, r"pad_to_multiple_of is 8"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_prompt_that_must_be_shared_and_cannot_is_an_error(
    case: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, args, reason = REFUSALS[case]
    text = (
        rf"shared_prompt_forward=True, but {reason}.*: a prompt cannot be computed once.*shared_prompt_forward='auto'"
    )
    with pytest.raises(ValueError, match=text):
        make_trainer(request.getfixturevalue(model), tmp_path, by_completion, shared_prompt_forward=True, **args)


@pytest.mark.parametrize("case", [case for case in REFUSALS if case != "dropout"])
def test_auto_computes_each_row_on_its_own_where_it_must(
    case: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, args, _ = REFUSALS[case]
    model = request.getfixturevalue(model)
    ours = run(model, tmp_path, by_completion, **ACCUMULATED, **args)
    stock = run(model, tmp_path, by_completion, cls=GRPOTrainer, **ACCUMULATED, **args)
    assert ours.forwards.packed == [False, False]
    assert stock.watch.gradients[0].norm() > 1e-3
    assert difference(ours.watch.gradients[0], stock.watch.gradients[0]) < 1e-5


def test_widths_stay_multiples_where_they_are_wanted(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(tiny_model, tmp_path, HALF, pad_to_multiple_of=8, **ACCUMULATED)
    assert len(rows(*trainer.trained)) == 4
    for batch in trainer.trained:
        assert batch["prompt_ids"].shape[1] % 8 == batch["completion_ids"].shape[1] % 8 == 0


def test_a_prompt_that_must_be_shared_is_an_error_where_the_layouts_differ(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_grpo_ext.forward.same_in_both_layouts", lambda *_, **__: False)
    with pytest.raises(ValueError, match=r"shared_prompt_forward=True, but .* computes other log-probabilities"):
        run(tiny_model, tmp_path, by_completion, shared_prompt_forward=True)


def test_the_error_about_dropout_does_not_advise_what_is_done_already(dropout_model: str, tmp_path: Path) -> None:
    # TRL's disable_dropout switches off modules; the dropout of the attention is a number in the config.
    with pytest.raises(ValueError, match=r"shared_prompt_forward=True, but the model has dropout.*attention_dropout"):
        make_trainer(dropout_model, tmp_path, by_completion, shared_prompt_forward=True, disable_dropout=True)


def test_auto_leaves_a_model_with_dropout_alone(dropout_model: str, tmp_path: Path) -> None:
    trainer = run(dropout_model, tmp_path, by_completion, **ACCUMULATED)
    assert trainer.forwards.packed == [False, False]


def test_auto_leaves_an_adapter_with_dropout_alone_unless_it_is_off(tiny_model: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for disabled in (False, True):
        adapter = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
        trainer = run(
            tiny_model,
            tmp_path,
            by_completion,
            trainer={"peft_config": adapter},
            disable_dropout=disabled,
            **ACCUMULATED,
        )
        assert trainer.forwards.packed == [disabled, disabled]


def test_auto_leaves_a_model_alone_that_computes_something_else(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_grpo_ext.forward.same_in_both_layouts", lambda *_, **__: False)
    trainer = run(tiny_model, tmp_path, by_completion, **ACCUMULATED)
    assert trainer.forwards.packed == [False, False]


def test_the_layouts_are_compared_once(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("hf_grpo_ext.forward.same_in_both_layouts", lambda *_, **__: calls.append(1) or True)
    trainer = run(tiny_model, tmp_path, by_completion, max_steps=2, learning_rate=1e-3, beta=0.1)
    assert trainer.forwards.packed == [True, True]
    assert len(calls) == 2  # of the policy and of the reference


def test_auto_packs_where_it_pays(tiny_model: str, tmp_path: Path) -> None:
    # One row a micro-batch: nothing is shared, and of a long row the last token alone is left out.
    args = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    long = Dataset.from_dict({"prompt": [f"{text} " * 6 for text in PROMPTS]})
    alone = run(tiny_model, tmp_path, by_completion, dataset=long, **args)
    forced = run(tiny_model, tmp_path, by_completion, dataset=long, shared_prompt_forward=True, **args)
    assert min(alone.forwards.tokens) > 20
    assert alone.forwards.packed == [False] * 8
    assert forced.forwards.packed == [True] * 8
    assert difference(forced.watch.gradients[0], alone.watch.gradients[0]) < 1e-5
    # Of a short one it is one of a dozen.
    short = run(tiny_model, tmp_path, by_completion, **args)
    assert max(short.forwards.tokens) < 15
    assert short.forwards.packed == [True] * 8


def test_rows_of_one_prompt_meet_in_one_micro_batch(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(tiny_model, tmp_path, by_completion, **ACCUMULATED)
    scored = trainer.scored[0]
    prompts = scored["prompt_mask"].sum(-1)[[0, 4]]
    assert sum(trainer.forwards.tokens) == int((prompts - 1).sum() + scored["completion_mask"].sum())
    assert all(len(torch.unique(batch["prompt_ids"], dim=0)) == 1 for batch in trainer.trained)


def test_off_never_packs(tiny_model: str, tmp_path: Path) -> None:
    trainer = run(tiny_model, tmp_path, by_completion, shared_prompt_forward=False, beta=0.1, **ACCUMULATED)
    assert trainer.forwards.packed == [False, False]
    assert not hasattr(trainer.model.base_model, "_keeps_scored_positions")


@pytest.mark.parametrize(("value", "read"), [("AUTO", "auto"), ("True", True), ("false", False), (False, False)])
def test_the_command_line_says_it_in_words(tmp_path: Path, value: Any, read: Any) -> None:
    assert GRPOExtConfig(str(tmp_path), use_cpu=True, shared_prompt_forward=value).shared_prompt_forward == read


@pytest.mark.parametrize("value", ["yes", "", None, 1])
def test_another_value_is_an_error(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"shared_prompt_forward={value!r}: it must be 'auto', True or False"):
        GRPOExtConfig(str(tmp_path), use_cpu=True, shared_prompt_forward=value)


# The gradient is the same with each prompt once


def perturbed_reference(trainer: Any) -> None:
    """A reference that differs from the policy, as after some training."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in trainer.ref_model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.005)


def perturbed_adapter(trainer: Any) -> None:
    """An adapter that does something: a new one starts at 0."""
    assert trainer.ref_model is None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.05)


def adapter() -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])}


def tool_output(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout function: the given completions, the second and third token of which a tool has written."""
    prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
    ids = [given_completion(p, row % 4, 7) for row, p in enumerate(prompt_ids)]
    mask = [[int(token not in (1, 2)) for token in range(len(row))] for row in ids]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": mask}


TWICE = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.01}
METHODS: dict[str, dict[str, Any]] = {
    "kl against a second model": {"beta": 0.1, "prepare": perturbed_reference},
    "kl against the model without its adapter": {
        "beta": 0.1,
        "trainer": adapter,
        "prepare": perturbed_adapter,
        "learning_rate": 0.1,
    },
    "kl in the reward": {"beta": 0.1, "loss_fn": {"use_kl_in_reward": True}, "prepare": perturbed_reference},
    "two iterations": TWICE | {"epsilon": 0.05},
    "gspo": TWICE | {"loss_fn": {"name": "gspo", "ratio_clip_min": 0.1, "ratio_clip_max": 0.1}, "learning_rate": 1e-3},
    "cispo": TWICE | {"loss_type": "cispo", "epsilon_high": 1.1},
    "entropy bonus": {"entropy_coef": 0.1},
    "tokens of high entropy": {"top_entropy_quantile": 0.3},
    "tool masks": {"trainer": {"rollout_func": tool_output}},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "temperature": {"temperature": 0.7},
    "float32 head": {"cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_with_each_prompt_once(tiny_model: str, tmp_path: Path, method: str) -> None:
    def build(shared: bool) -> Any:
        args = {"max_steps": 1, **METHODS[method]}
        made = args.pop("trainer", {})
        return run(
            tiny_model,
            tmp_path,
            by_completion,
            shared_prompt_forward=shared,
            trainer=made() if callable(made) else dict(made),
            **(ACCUMULATED | args),
        )

    ours, plain = build(True), build(False)
    assert ours.forwards.packed == [True] * len(ours.forwards.packed)
    assert not any(plain.forwards.packed)
    assert sum(ours.forwards.tokens) < 0.8 * sum(plain.forwards.tokens)
    if scoring := plain.forwards.tokens_without_gradient:  # by the reference, or before the first of two iterations
        assert max(ours.forwards.tokens_without_gradient) < 0.8 * max(scoring)
    assert len(ours.watch.gradients) == METHODS[method].get("max_steps", 1)
    for actual, expected in zip(ours.watch.gradients, plain.watch.gradients, strict=True):
        assert expected.norm() > 1e-3
        assert difference(actual, expected) < 1e-5
    timing = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    for entry, other in zip(ours.state.log_history, plain.state.log_history, strict=True):
        for key in entry.keys() - timing:
            assert entry[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("method", ["kl against a second model", "kl against the model without its adapter"])
def test_the_kl_of_the_methods_above_is_not_0(tiny_model: str, tmp_path: Path, method: str) -> None:
    args = dict(METHODS[method])
    made = args.pop("trainer", {})
    trainer = run(tiny_model, tmp_path, by_completion, trainer=made() if callable(made) else made, **args)
    assert logged(trainer, "kl")[0] > 1e-3


def test_an_evaluation_with_each_prompt_once(tiny_model: str, tmp_path: Path) -> None:
    def build(shared: bool) -> Any:
        trainer = make_trainer(
            tiny_model,
            tmp_path,
            by_completion,
            trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[2:6]})},
            shared_prompt_forward=shared,
            per_device_eval_batch_size=8,
        )
        trainer.forwards = Forwards(trainer)
        return trainer, trainer.evaluate()

    (ours, metrics), (plain, expected) = build(True), build(False)
    assert sum(ours.forwards.tokens_without_gradient) < 0.8 * sum(plain.forwards.tokens_without_gradient)
    assert abs(expected["eval_loss"]) > 1e-3
    for key in ("eval_loss", "eval_entropy", "eval_probs_ratio"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-4), key


# However the rows are split, the step is the same


LAYOUTS: dict[str, dict[str, Any]] = {
    "2 x 4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "4 x 2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "8 x 1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "two generation batches": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
    },
    # Eight rows are all there is of a window of sixteen.
    "the short last window": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "max_steps": -1,
        "num_train_epochs": 1,
    },
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "kl": {"beta": 0.1, "prepare": perturbed_reference},
}


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["auto", False])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_does_not_depend_on_how_its_rows_are_split(
    tiny_model: str, tmp_path: Path, objective: str, shared: Any
) -> None:
    def build(**layout: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
        tokenizer = {"processing_class": make_tokenizer()}
        trainer = run(
            model,
            tmp_path,
            one_silent_group_of_two,
            dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
            trainer=tokenizer,
            shared_prompt_forward=shared,
            **(OBJECTIVES[objective] | layout),
        )
        assert any(trainer.forwards.packed) is (shared == "auto")
        return trainer

    def one_silent_group_of_two(prompts: list[str], **args: Any) -> list[float]:
        return [
            value if prompt == PROMPTS[0] else 1.0 for prompt, value in zip(prompts, by_completion(**args), strict=True)
        ]

    whole = build(per_device_train_batch_size=8)
    expected: Tensor = whole.watch.gradients[0]
    assert expected.norm() > 1e-2
    for name, layout in LAYOUTS.items():
        other = build(**layout)
        assert len(other.watch.gradients) == 1
        assert difference(other.watch.gradients[0], expected) < 1e-6, name


# Models whose log-probabilities depend on padding

UNEVEN = Dataset.from_dict({"prompt": ["1 + 2 + 3 + 4 =", "5 ="]})


@pytest.fixture(scope="module")
def learned_positions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2, which counts positions from the first column."""
    folder = str(tmp_path_factory.mktemp("gpt2"))
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    with torch.no_grad():  # positions that matter
        model.transformer.wpe.weight.mul_(20)
        model.lm_head.weight.mul_(5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_model_with_learned_positions_keeps_the_width_of_its_rows(
    learned_positions: str, tmp_path: Path, beta: float
) -> None:
    fields = {"dataset": UNEVEN, "beta": beta, "disable_dropout": True, "loss_type": "dapo"}
    runs = [run(learned_positions, tmp_path, HALF, **fields, **layout) for layout in ({}, ACCUMULATED)]
    stock = run(learned_positions, tmp_path, HALF, cls=GRPOTrainer, **fields)
    for trainer in runs:
        assert difference(trainer.watch.gradients[0], stock.watch.gradients[0]) < 1e-5
    skipped = beta == 0
    assert logged(runs[1], "frac_rows_skipped") == [0.5 if skipped else 0]
    assert sum(len(batch["completion_ids"]) for batch in runs[1].trained) == (4 if skipped else 8)
    if beta:
        assert logged(runs[1], "kl") == pytest.approx([0], abs=1e-6)


def test_dynamic_sampling_is_refused_where_padding_matters(learned_positions: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_dynamic_sampling=True with GPT2LMHeadModel: its rounds differ in width"):
        make_trainer(learned_positions, tmp_path, HALF, use_dynamic_sampling=True)


def test_dropout_of_heads_that_are_not_there_does_not_count(tmp_path: Path) -> None:
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.classifier_dropout, config.summary_first_dropout = 0.1, 0.1
    assert not draws_dropout(Qwen2ForCausalLM(config))
    config.attention_dropout = 0.1
    assert draws_dropout(Qwen2ForCausalLM(config))


def test_an_interrupted_step_leaves_no_metrics(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model, tmp_path, by_completion, learning_rate=0.0, **ACCUMULATED)
    whole = type(trainer)._compute_loss
    calls = iter(range(99))

    def broken(self: Any, model: Any, inputs: Any) -> Tensor:
        loss = whole(self, model, inputs)
        if next(calls) == 0:
            raise KeyboardInterrupt
        return loss

    type(trainer)._compute_loss = broken
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert logged(trainer, "probs_ratio")[-1] == pytest.approx(1)


def test_a_step_in_which_no_row_counts_leaves_a_gap_and_the_entropy_coefficient(
    tiny_model: str, tmp_path: Path
) -> None:
    trainer = run(
        tiny_model,
        tmp_path,
        by_completion,
        mixin=TruncatesAll,
        mask_truncated_completions=True,
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        entropy_target=5.0,
    )
    assert logged(trainer, "num_valid_samples") == [0]
    assert logged(trainer, "entropy") == logged(trainer, "probs_ratio") == []
    assert trainer.entropy_coef == pytest.approx(0.1)

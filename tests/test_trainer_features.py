"""What `GRPOTrainer` can do beside its loss stays alive, and reward components work in every form."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from tiny import make_tokenizer, save_tiny_model
from tiny_env import (
    CENTRED,
    PROMPTS,
    GivenRollouts,
    by_completion,
    chat,
    constant,
    logged,
    make_trainer,
    quiet,
    scoring_environment,
    tool_tokenizer,
    trained,
)
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification
from trl import GRPOConfig

from hf_grpo_ext import GRPOExtTrainer, get_gdpo_reward_component_keys

pytestmark = quiet
NAN = math.nan


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


# Reward components, in every form

# Two groups of four. `length` does not apply to row 1, and nothing scores row 6.
CORRECT = [1, 0, 0, 0, 1, 1, None, 0]
LENGTH = [0.5, None, 0.5, 1, 0, 0.25, None, 0]
# The totals are [1.5, 0, .5, 1] and [1, 1.25, -, 0], each with the mean .75; row 6 neither votes nor trains.
CENTRED_ADVANTAGES = [0.75, -0.75, -0.25, 0.25, 0.25, 0.5, 0, -0.75]


def by_sample() -> list[dict[str, Any] | None]:
    """The same rewards, with a missing key where one is absent and None for the row that nothing scores."""
    rows = [
        {name: value for name, value in (("correct", c), ("length", l)) if value is not None}
        for c, l in zip(CORRECT, LENGTH, strict=True)
    ]
    return [row or None for row in rows]


def numbers(values: list[Any]) -> list[float]:
    return [NAN if value is None else float(value) for value in values]


ANSWERS = {
    "dict of lists": {"correct": CORRECT, "length": LENGTH},
    "dict of tensors": {"correct": torch.tensor(numbers(CORRECT)), "length": torch.tensor(numbers(LENGTH))},
    "dict of arrays": {"correct": np.array(numbers(CORRECT)), "length": np.array(numbers(LENGTH))},
    "list of dicts": by_sample(),
}


class Scorer:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, **_: Any) -> Any:
        return self.answer


class AsyncScorer(Scorer):
    async def __call__(self, **_: Any) -> Any:
        return self.answer


def take(answer: Any, **_: Any) -> Any:
    return answer


def in_form(form: str, answer: Any) -> Any:
    """`answer` from a callable of each kind that TRL takes."""

    async def coroutine(**_: Any) -> Any:
        return answer

    return {
        "function": constant(answer),
        "async": coroutine,
        "partial": functools.partial(take, answer),
        "partial of async": functools.partial(coroutine),
        "object": Scorer(answer),
        "async object": AsyncScorer(answer),
        "lambda": lambda **_: answer,
    }[form]


def check_components(trainer: Any) -> None:
    """`CORRECT` and `LENGTH` came through: into the batch, the advantages and the curves."""
    batch = trainer.scored[0]
    assert get_gdpo_reward_component_keys(batch) == ["reward/correct", "reward/length"]
    torch.testing.assert_close(batch["reward/correct"], torch.tensor(numbers(CORRECT)), equal_nan=True)
    torch.testing.assert_close(batch["reward/length"], torch.tensor(numbers(LENGTH)), equal_nan=True)
    torch.testing.assert_close(batch["advantages"], torch.tensor(CENTRED_ADVANTAGES))
    assert list(trainer._logs["advantages"]) == pytest.approx(CENTRED_ADVANTAGES)
    # Over the rows that have the component: 3 of 7, and 2.25 / 6.
    assert logged(trainer, "rewards/correct/mean") == pytest.approx([3 / 7])
    assert logged(trainer, "rewards/length/mean") == pytest.approx([0.375])
    assert logged(trainer, "rewards/length/std") == pytest.approx([stdev([0.5, 0.5, 1, 0, 0.25, 0])])
    assert logged(trainer, "reward") == pytest.approx([mean([1.5, 0, 0.5, 1, 1, 1.25, 0])])


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("form", ["function", "async"])
def test_components_arrive_in_every_form_of_answer(tiny_model: str, tmp_path: Path, form: str, answer: str) -> None:
    check_components(trained(tiny_model, tmp_path, in_form(form, ANSWERS[answer]), adv_estimator=CENTRED))


@pytest.mark.parametrize("form", ["partial", "partial of async", "object", "async object", "lambda"])
def test_components_arrive_from_every_form_of_callable(tiny_model: str, tmp_path: Path, form: str) -> None:
    check_components(trained(tiny_model, tmp_path, [in_form(form, by_sample())], adv_estimator=CENTRED))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("function", "score"),
        ("async", "coroutine"),
        ("partial", "take"),
        ("partial of async", "coroutine"),
        ("object", "Scorer"),
        ("async object", "AsyncScorer"),
        ("lambda", "<lambda>"),
    ],
)
def test_plain_numbers_are_the_component_of_the_functions_name(
    tiny_model: str, tmp_path: Path, form: str, name: str
) -> None:
    totals = [1.5, 0, 0.5, 1, 1, 1.25, None, 0]
    trainer = trained(tiny_model, tmp_path, in_form(form, totals), adv_estimator=CENTRED)
    assert get_gdpo_reward_component_keys(trainer.scored[0]) == [f"reward/{name}"]
    torch.testing.assert_close(trainer.scored[0]["advantages"], torch.tensor(CENTRED_ADVANTAGES))
    assert logged(trainer, f"rewards/{name}/mean") == pytest.approx([5.25 / 7])


def test_functions_of_every_kind_stand_side_by_side(tiny_model: str, tmp_path: Path) -> None:
    async def named(**_: Any) -> dict[str, list[int]]:
        return {"b": [0, 1] * 4, "a": [1, 0, 0, 1] * 2}

    trainer = trained(tiny_model, tmp_path, [constant([1, 1, 0, 0] * 2), named], adv_estimator=CENTRED)
    # In the order of the functions, and inside one by name; totals [2, 2, 0, 2] in both groups.
    assert trainer.reward_func_names == ["score", "a", "b"]
    assert trainer.scored[0]["advantages"].tolist() == [0.5, 0.5, -1.5, 0.5] * 2


def test_rows_that_train_carry_the_advantages_that_were_logged(tiny_model: str, tmp_path: Path) -> None:
    # The loss sees shuffled rows: find each by its text.
    trainer = trained(tiny_model, tmp_path, by_completion, adv_estimator="grpo")
    decode = trainer.processing_class.batch_decode
    in_loss = trainer.trained[0]
    texts = decode(
        [ids[m.bool()] for ids, m in zip(in_loss["completion_ids"], in_loss["completion_mask"], strict=True)],
        skip_special_tokens=True,
    )
    pairs = sorted(zip(texts, in_loss["advantages"].tolist(), strict=True))
    assert pairs == sorted(zip(trainer._logs["completion"], trainer._logs["advantages"], strict=True))
    assert len({advantage for _, advantage in pairs}) == 8


def test_reward_model_as_path_and_as_object(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(1)
    judge = Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_labels=1,
            pad_token_id=0,
        )
    )
    judge.score.weight.data.mul_(50)
    judge.save_pretrained(folder)
    judge = Qwen2ForSequenceClassification.from_pretrained(folder)

    expected = None
    for model in (str(folder), judge):
        trainer = trained(
            tiny_model,
            tmp_path,
            [model, constant({"a": [1, 0, 0, 0] * 2})],
            adv_estimator=CENTRED,
            reward_weights=[2, 1],
        )
        batch = trainer.scored[0]
        assert get_gdpo_reward_component_keys(batch) == ["reward/a", "reward/judge"]
        if expected is None:
            # By hand, one sample at a time: no padding, no batch. The text is the prompt and the completion run
            # together, without the <eos> that decoding has dropped.
            ids = AutoTokenizer.from_pretrained(folder)(
                [p + c for p, c in zip(trainer._logs["prompt"], trainer._logs["completion"], strict=True)]
            )["input_ids"]
            with torch.no_grad():
                expected = torch.stack([judge.eval()(torch.tensor([row])).logits[0, 0] for row in ids])
            assert expected.std() > 0.1
        torch.testing.assert_close(batch["reward/judge"], expected, rtol=1e-4, atol=1e-5)
        total = 2 * expected + torch.tensor([1.0, 0, 0, 0] * 2)
        centred = total.view(2, 4) - total.view(2, 4).mean(1, keepdim=True)
        torch.testing.assert_close(batch["advantages"], centred.flatten(), rtol=1e-4, atol=1e-5)
        assert logged(trainer, "rewards/judge/mean") == pytest.approx([expected.mean().item()], rel=1e-4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_environment_that_returns_components(tiny_model: str, tmp_path: Path, asynchronous: bool) -> None:
    environment = scoring_environment("Game", by_sample(), asynchronous=asynchronous)
    trainer = trained(
        tiny_model,
        tmp_path,
        None,
        dataset=chat(),
        trainer={"environment_factory": environment, "processing_class": tool_tokenizer()},
        adv_estimator=CENTRED,
    )
    check_components(trainer)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_environment_that_returns_a_number_beside_a_function(
    tiny_model: str, tmp_path: Path, asynchronous: bool
) -> None:
    environment = scoring_environment("Game", [2.0, 0, 0, 0, 0, 0, 0, 1.0], asynchronous=asynchronous)
    trainer = trained(
        tiny_model,
        tmp_path,
        constant({"a": [0, 0, 0, 1] * 2}),
        dataset=chat(),
        trainer={"environment_factory": environment, "processing_class": tool_tokenizer()},
        adv_estimator=CENTRED,
        reward_weights=[4.0],  # of the function; an environment weighs 1
    )
    assert get_gdpo_reward_component_keys(trainer.scored[0]) == ["reward/Game", "reward/a"]
    assert logged(trainer, "rewards/Game/mean") == [0.375]
    # Totals [2, 0, 0, 4] and [0, 0, 0, 5].
    assert trainer.scored[0]["advantages"].tolist() == [0.5, -1.5, -1.5, 2.5, -1.25, -1.25, -1.25, 3.75]


def test_two_environments_in_a_dict_score_their_own_rows(tiny_model: str, tmp_path: Path) -> None:
    # Prompt 0 plays `Sums`, prompt 1 plays `Code`.
    sums = scoring_environment("Sums", [{"right": 1, "steps": 1}, {"right": 0, "steps": 2}, {"right": 0}, {"right": 1}])
    code = scoring_environment("Code", [{"tests": 3.0}, {"tests": 1.0}, {"tests": 0.0}, {"tests": 0.0}])
    trainer = trained(
        tiny_model,
        tmp_path,
        None,
        dataset=chat(PROMPTS[:2], environment=["sums", "code"]),
        trainer={"environment_factory": {"sums": sums, "code": code}, "processing_class": tool_tokenizer()},
        adv_estimator=CENTRED,
    )
    assert logged(trainer, "rewards/right/mean") == [0.5]
    assert logged(trainer, "rewards/steps/mean") == [1.5]
    assert logged(trainer, "rewards/tests/mean") == [1.0]
    # Totals [2, 2, 0, 1] and [3, 1, 0, 0].
    assert trainer.scored[0]["advantages"].tolist() == [0.75, 0.75, -1.25, -0.25, 2, 0, -1, -1]


# gdpo


def centred(values: list[Any]) -> list[float]:
    """Each value minus the mean of those present in its group of four; 0 where absent."""
    out = []
    for start in range(0, len(values), 4):
        group = values[start : start + 4]
        present = [value for value in group if value is not None]
        out += [0.0 if value is None else value - mean(present) for value in group]
    return out


def test_gdpo_compares_each_component_in_its_group_and_whitens_the_sum(tiny_model: str, tmp_path: Path) -> None:
    trainer = trained(
        tiny_model,
        tmp_path,
        constant(by_sample()),
        adv_estimator=CENTRED | {"name": "gdpo"},
        reward_weights={"length": 2.0},
    )
    sums = [c + 2 * l for c, l in zip(centred(CORRECT), centred(LENGTH), strict=True)]
    valid = [s for row, s in enumerate(sums) if row != 6]  # nothing scores row 6
    expected = [0.0 if row == 6 else (s - mean(valid)) / stdev(valid) for row, s in enumerate(sums)]
    assert trainer.scored[0]["advantages"].tolist() == pytest.approx(expected, abs=1e-6)
    assert list(trainer._logs["advantages"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("estimator", "silent"), [("grpo", 1.0), ("gdpo", 0.5)])
def test_a_group_with_any_varying_component_is_signal_under_gdpo(
    tiny_model: str, tmp_path: Path, estimator: str, silent: float
) -> None:
    # The sum is 1 in every row; the components vary in the first group alone.
    answer = {"x": [1, 0, 1, 0, 1, 1, 1, 1], "y": [0, 1, 0, 1, 0, 0, 0, 0]}
    trainer = trained(tiny_model, tmp_path, constant(answer), adv_estimator=estimator, reward_weights={"y": 1.0})
    assert logged(trainer, "frac_reward_zero_std") == [silent]


# Components that come and go


def by_step(answers: list[Any]) -> Any:
    """A reward function that gives the next answer each time it is called."""
    rest = iter(answers)

    def score(**_: Any) -> Any:
        return next(rest)

    return score


def table(folder: Path, step: int) -> pd.DataFrame:
    return pd.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def test_a_component_that_comes_late_or_goes_is_a_gap(tiny_model: str, tmp_path: Path) -> None:
    a, b = [1.0, 0, 0, 0] * 2, [0.0, 0, 1, 1] * 2
    trainer = trained(
        tiny_model,
        tmp_path,
        by_step([{"a": a}, {"a": a, "b": b}, {"b": b}]),
        adv_estimator=CENTRED,
        max_steps=3,
        log_completions=True,
    )
    history = trainer.state.log_history
    assert [entry.get("rewards/a/mean") for entry in history[:3]] == [0.25, 0.25, None]
    assert [entry.get("rewards/b/mean") for entry in history[:3]] == [None, 0.5, 0.5]
    # b alone has the totals [0, 0, 1, 1]: an absent component adds 0 and does not make the row absent.
    assert trainer.scored[2]["advantages"].tolist() == [-0.5, -0.5, 0.5, 0.5] * 2
    assert table(tmp_path, 1)["a"].tolist() == a
    assert "b" not in table(tmp_path, 1)
    assert table(tmp_path, 2)["b"].tolist() == b
    assert table(tmp_path, 3)["a"].isna().all()
    assert table(tmp_path, 3)["advantage"].tolist() == [-0.5, -0.5, 0.5, 0.5] * 2


def test_a_function_that_is_silent_at_first_names_its_components_later(tiny_model: str, tmp_path: Path) -> None:
    a = [1.0, 0, 0, 0] * 2
    trainer = trained(
        tiny_model,
        tmp_path,
        [constant([0.0] * 8), by_step_named([None] * 8, {"a": a})],
        adv_estimator=CENTRED,
        max_steps=2,
        log_completions=True,
    )
    assert logged(trainer, "rewards/a/mean") == [0.25]
    assert table(tmp_path, 2)["a"].tolist() == a
    assert trainer.scored[1]["advantages"].tolist() == [0.75, -0.25, -0.25, -0.25] * 2


def by_step_named(*answers: Any) -> Any:
    function = by_step(list(answers))

    def late(**kwargs: Any) -> Any:
        return function(**kwargs)

    return late


def test_completions_of_a_small_evaluation_are_logged_when_components_come_late(
    tiny_model: str, tmp_path: Path
) -> None:
    # Four rows are logged before the function first names its components, and the log holds eight.
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        [constant([0.0] * 4), by_step_named([None] * 4, {"a": [1.0, 0, 0, 0]})],
        trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})},
        per_device_eval_batch_size=4,
        log_completions=True,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/a/mean"] == 0.25
    assert table(tmp_path, 0)["a"].tolist() == pytest.approx([NAN] * 4 + [1.0, 0, 0, 0], nan_ok=True)


# Weights


def test_a_list_of_weights_is_one_a_function(tiny_model: str, tmp_path: Path) -> None:
    named = {"x": [1, 0, 0, 0] * 2, "y": [0, 1, 0, 0] * 2}
    trainer = trained(
        tiny_model,
        tmp_path,
        [constant(named), lambda **_: [0, 0, 1, 0] * 2],
        adv_estimator=CENTRED,
        reward_weights=[2, -4],
    )
    # Totals [2, 2, -4, 0].
    assert trainer.scored[0]["advantages"].tolist() == [2, 2, -4, 0] * 2
    assert logged(trainer, "reward") == [0.0]


def test_a_dict_of_weights_is_by_component_and_1_elsewhere(tiny_model: str, tmp_path: Path) -> None:
    named = {"x": [1, 0, 0, 0] * 2, "y": [0, 1, 0, 0] * 2}
    trainer = trained(
        tiny_model,
        tmp_path,
        [constant(named), lambda **_: [0, 0, 1, 0] * 2],
        adv_estimator=CENTRED,
        reward_weights={"y": 3, "<lambda>": 0},
    )
    # Totals [1, 3, 0, 0].
    assert trainer.scored[0]["advantages"].tolist() == [0, 2, -1, -1] * 2
    assert logged(trainer, "reward") == [1.0]
    assert trainer.args.reward_weights == {"y": 3, "<lambda>": 0}


def test_a_weight_of_a_component_that_comes_late_is_no_error(tiny_model: str, tmp_path: Path) -> None:
    # In a mixed data set the first batch may hold no sample that the component applies to.
    trainer = trained(
        tiny_model,
        tmp_path,
        by_step([{"a": [1, 0, 0, 0] * 2}, {"a": [1, 0, 0, 0] * 2, "b": [0, 1, 0, 0] * 2}]),
        adv_estimator=CENTRED,
        max_steps=2,
        reward_weights={"b": 3},
    )
    assert trainer.scored[1]["advantages"].tolist() == [0, 2, -1, -1] * 2


# Errors that say what came, the rule and the fix


def test_an_unknown_weight_names_the_components_that_exist(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'z', which is no reward component. The components are: x, y"):
        trained(
            tiny_model, tmp_path, constant({"x": [0] * 8, "y": [1] * 8}), adv_estimator=CENTRED, reward_weights={"z": 1}
        )


BAD_ANSWERS = {
    "too few numbers": ([1.0] * 7, ValueError, "reward function 'score' returned 7 values for 8 completions"),
    "too many numbers": ([1.0] * 9, ValueError, "reward function 'score' returned 9 values for 8 completions"),
    "too few of a component": (
        {"a": [1.0] * 8, "b": [1.0] * 7},
        ValueError,
        "Component 'b' of the reward function 'score' returned 7 values for 8 completions",
    ),
    "too few dicts": ([{"a": 1}] * 7, ValueError, "returned 7 values for 8 completions"),
    "too few None": ([None] * 7, ValueError, "returned 7 values for 8 completions"),
    "mixed kinds": ([1.0, {"a": 1}] * 4, ValueError, "numbers for some samples and named components for others"),
    "text": (["good"] * 8, TypeError, "reward function 'score' holds 'good': a reward must be a number or None"),
    "one text": ("12345678", TypeError, "The reward function 'score' returned str"),
    "text in a component": ({"a": ["1"] * 8}, TypeError, "Component 'a' .* holds '1': a reward must be a number"),
    "infinite": ([math.inf] + [0.0] * 7, ValueError, "holds inf: a reward must be finite"),
    "infinite component": ([{"a": -math.inf}] * 8, ValueError, "holds -inf: a reward must be finite"),
    "empty dict": ({}, ValueError, "returned an empty dict"),
    "nameless": ({3: [1.0] * 8}, TypeError, "named a component 3: a name must be a non-empty string"),
    "one number": (1.0, TypeError, "returned float: a list of numbers"),
    "nothing": (None, TypeError, "returned NoneType: a list of numbers"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
@pytest.mark.parametrize("form", ["function", "async"])
def test_a_reward_function_that_returns_nonsense(tiny_model: str, tmp_path: Path, form: str, case: str) -> None:
    answer, error, text = BAD_ANSWERS[case]
    function = in_form(form, answer)
    function.__name__ = "score"
    with pytest.raises(error, match=text):
        trained(tiny_model, tmp_path, function, adv_estimator=CENTRED)


def test_a_reward_function_that_changes_its_kind(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'score' returned named components now and numbers before"):
        trained(tiny_model, tmp_path, by_step([[1.0] * 8, {"a": [1.0] * 8}]), adv_estimator=CENTRED, max_steps=2)


def test_two_functions_of_one_name(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Two reward functions have the name '<lambda>'.*`__name__`"):
        make_trainer(tiny_model, tmp_path, [lambda **_: [0.0] * 8, lambda **_: [1.0] * 8])


@pytest.mark.parametrize("other", [{"score": [1.0] * 8}, {"a": [1.0] * 8}])
def test_two_components_of_one_name(tiny_model: str, tmp_path: Path, other: dict[str, Any]) -> None:
    # A function's own name is a component's name too.
    functions = [constant([1.0] * 8 if "score" in other else {"a": [0.0] * 8}), by_step_named(other)]
    with pytest.raises(ValueError, match=f"Two reward components have the name '{next(iter(other))}'"):
        trained(tiny_model, tmp_path, functions, adv_estimator=CENTRED)


@pytest.mark.parametrize("answer", [[1.0, 0.0] * 4, {"only": [1.0, 0.0] * 4}])
def test_gdpo_with_one_component(tiny_model: str, tmp_path: Path, answer: Any) -> None:
    seen = "only" if isinstance(answer, dict) else "score"
    with pytest.raises(ValueError, match=rf"at least two reward components, but saw 1: \['{seen}'\].*=\"grpo\""):
        trained(tiny_model, tmp_path, constant(answer), adv_estimator="gdpo")


def test_a_data_set_smaller_than_a_generation_batch(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 prompts, but one generation batch takes 2 \(generation_batch_size=8"):
        make_trainer(tiny_model, tmp_path, by_completion, dataset=Dataset.from_dict({"prompt": PROMPTS[:1]}))


def test_arguments_of_the_wrong_class(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="args is a GRPOConfig: GRPOExtTrainer needs a GRPOExtConfig"):
        GRPOExtTrainer(
            tiny_model,
            by_completion,
            args=GRPOConfig(str(tmp_path), use_cpu=True),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        )


@pytest.mark.parametrize("as_file", [False, True])
def test_an_adapter_that_was_loaded_for_inference(tiny_model: str, tmp_path: Path, as_file: bool) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    frozen = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"no trainable parameter.*is_trainable=True"):
        make_trainer(frozen, tmp_path, by_completion, beta=0.1 if as_file else 0.0)


@pytest.mark.parametrize("knob", ["use_importance_sampling_correction", "use_on_policy_kl_approximation"])
def test_a_correction_without_an_engine(tiny_model: str, tmp_path: Path, knob: str) -> None:
    with pytest.raises(ValueError, match=r"needs the log-probabilities of the engine that sampled.*use_vllm=True"):
        make_trainer(tiny_model, tmp_path, by_completion, loss_fn={knob: True}, beta=0.1)


def test_an_evaluation_batch_that_does_not_hold_whole_groups(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        by_completion,
        trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:3]})},
        per_device_eval_batch_size=6,
        num_generations_eval=4,
    )
    with pytest.raises(ValueError, match=r"6 completions does not hold whole groups of 4.*num_generations_eval"):
        trainer.evaluate()

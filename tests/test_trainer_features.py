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
    EOS,
    PROMPTS,
    TOOL_CALL,
    GivenRollouts,
    by_completion,
    chat,
    check_gradient,
    constant,
    difference,
    flat,
    given_completion,
    gradient,
    logged,
    make_trainer,
    on_policy_loss,
    padded,
    quiet,
    rows_of,
    scoring_environment,
    token_logprobs,
    tool_tokenizer,
    trained,
    weights_of,
)
from tiny_vlm import pictures, tiny_llava, tiny_qwen2_vl
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

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
        {name: value for name, value in (("correct", correct), ("length", length)) if value is not None}
        for correct, length in zip(CORRECT, LENGTH, strict=True)
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


@pytest.mark.parametrize("container", [tuple, np.array, torch.tensor, iter])
def test_plain_numbers_in_every_container(tiny_model: str, tmp_path: Path, container: Any) -> None:
    trainer = trained(
        tiny_model, tmp_path, lambda **_: container([1.5, 0, 0.5, 1, 1, 1.25, NAN, 0]), adv_estimator=CENTRED
    )
    torch.testing.assert_close(trainer.scored[0]["advantages"], torch.tensor(CENTRED_ADVANTAGES))


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
        functions = [model, constant({"a": [1, 0, 0, 0] * 2})]
        trainer = trained(
            tiny_model,
            tmp_path,
            functions,
            adv_estimator=CENTRED,
            reward_weights=[2, 1],
        )
        assert functions[0] is model  # the caller's list is left as it was
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
    sums = [a + 2 * b for a, b in zip(centred(CORRECT), centred(LENGTH), strict=True)]
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


# What the log says about the components


def test_the_log_says_what_each_component_adds(tiny_model: str, tmp_path: Path) -> None:
    # In the first group x and y ask for the opposite; in the second y is constant, and z is in the second alone.
    answer = {
        "y": [0, 0, 1, 1, 5, 5, 5, 5],
        "x": [1, 1, 0, 0, 1, 0, 1, 0],
        "z": [None] * 4 + [2, 2, 2, 2],
    }
    trainer = trained(
        tiny_model, tmp_path, constant(answer), adv_estimator=CENTRED | {"name": "gdpo"}, reward_weights={"x": 2.0}
    )
    log = trainer.state.log_history[0]
    ours = {name: log[name] for name in log if "frac_groups" in name or "share" in name or "correlation" in name}
    # D_x = 2 * [.5, .5, -.5, -.5, .5, -.5, .5, -.5], D_y = [-.5, -.5, .5, .5, 0, 0, 0, 0], D_z = 0.
    # Sums of squares: D_x 8, D_y 1, their product -2, the sum S 8 + 1 - 4 = 5.
    assert ours == pytest.approx(
        {
            "rewards/x/frac_groups_without_signal": 0.0,
            "rewards/y/frac_groups_without_signal": 0.5,
            "rewards/z/frac_groups_without_signal": 1.0,  # of the one group that has it
            "rewards/x/advantage_share": (8 - 2) / 5,
            "rewards/y/advantage_share": (1 - 2) / 5,
            "rewards/z/advantage_share": 0.0,
            "rewards/correlation/x/y": -2 / 8**0.5,
        }
    )
    assert logged(trainer, "frac_reward_zero_std") == [0.0]


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_a_masked_row_does_not_count_as_signal(tiny_model: str, tmp_path: Path, estimator: str) -> None:
    class Truncated(GivenRollouts):
        truncated = staticmethod(lambda rank: rank == 0)

    # The first row of each group is cut off, and alone differs in the first.
    trainer = trained(
        tiny_model,
        tmp_path,
        constant({"a": [1, 0, 0, 0, 1, 0, 0, 1], "b": [0.0] * 8}),
        mixin=Truncated,
        adv_estimator=estimator,
        mask_truncated_completions=True,
    )
    assert logged(trainer, "rewards/a/frac_groups_without_signal") == [0.5]
    assert logged(trainer, "rewards/a/advantage_share") == [pytest.approx(1.0)]
    assert logged(trainer, "frac_reward_zero_std") == [0.5]


def test_evaluation_logs_its_own(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        constant({"x": [1, 0, 0, 0] * 2, "y": [0, 1, 0, 0] * 2}),
        trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})},
        adv_estimator="gdpo",
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/x/frac_groups_without_signal"] == 0
    assert metrics["eval_rewards/x/advantage_share"] == pytest.approx(0.5)
    assert metrics["eval_rewards/correlation/x/y"] == pytest.approx(-1 / 3)


# Components that come and go


def by_step(answers: list[Any]) -> Any:
    """A reward function that gives the next answer each time it is called."""
    rest = iter(answers)

    def score(**_: Any) -> Any:
        return next(rest)

    return score


def renamed(function: Any, name: str) -> Any:
    function.__name__ = name
    return function


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
        [constant([0.0] * 8), renamed(by_step([[None] * 8, {"a": a}]), "late")],
        adv_estimator=CENTRED,
        max_steps=2,
        log_completions=True,
    )
    assert logged(trainer, "rewards/a/mean") == [0.25]
    assert table(tmp_path, 2)["a"].tolist() == a
    assert trainer.scored[1]["advantages"].tolist() == [0.75, -0.25, -0.25, -0.25] * 2


def test_completions_of_a_small_evaluation_are_logged_when_components_come_late(
    tiny_model: str, tmp_path: Path
) -> None:
    # Four rows are logged before the function first names its components, and the log holds eight.
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        [constant([0.0] * 4), renamed(by_step([[None] * 4, {"a": [1.0, 0, 0, 0]}]), "late")],
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


def test_a_weight_of_a_component_that_comes_late_is_declared_by_none(tiny_model: str, tmp_path: Path) -> None:
    # In a mixed data set the first batch may hold no sample that the component applies to.
    first = [{"a": 1}, {"a": 0, "b": None}, {"a": 0}, {"a": 0}] * 2
    trainer = trained(
        tiny_model,
        tmp_path,
        by_step([first, [{"a": 1}, {"b": 1}, None, {"a": 0}] * 2]),
        adv_estimator=CENTRED,
        max_steps=2,
        reward_weights={"b": 2},
    )
    # Totals [1, 2, -, 0].
    assert trainer.scored[1]["advantages"].tolist() == [0, 1, 0, -1] * 2


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
    function = renamed(in_form(form, answer), "score")
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
    functions = [constant([1.0] * 8 if "score" in other else {"a": [0.0] * 8}), renamed(constant(other), "other")]
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


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_that_was_loaded_for_inference(tiny_model: str, tmp_path: Path, beta: float) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    frozen = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"no trainable parameter.*is_trainable=True"):
        make_trainer(frozen, tmp_path, by_completion, beta=beta)


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


# The step: a plain one first, so that what follows is about the feature

ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def tokens(*batches: dict[str, Any]) -> float:
    return sum(batch["completion_mask"].sum().item() for batch in batches)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_denominator_of_each_loss_type(tiny_model: str, tmp_path: Path, loss_type: str) -> None:
    trainer = trained(tiny_model, tmp_path, by_completion, loss_type=loss_type, **ACCUMULATED)
    batches = rows_of(trainer, accumulation=2)
    assert tokens(batches[0]) != tokens(batches[1])  # or a mean of means would do

    def loss(model: Any) -> Tensor:
        if loss_type == "grpo":  # the mean over 8 rows of their token mean
            return sum(on_policy_loss(b, model, 1 / b["completion_mask"].sum(1, keepdim=True)) for b in batches) / 8
        # Dr. GRPO: 8 rows, and completions of at most 8 tokens.
        return sum(on_policy_loss(b, model) for b in batches) / (8 * 8 if loss_type == "dr_grpo" else tokens(*batches))

    check_gradient(trainer, loss)
    with weights_of(trainer, 0) as model:
        assert logged(trainer, "loss") == pytest.approx([loss(model).item()], abs=1e-5)


# Rollout functions


def rollout(answer: Any = None, offset: Any = None, **extra: Any) -> Any:
    """A rollout function: the given completions (or `answer`), log-probabilities off by `offset(row, token)`."""

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        ids = answer or [given_completion(p, row % 4, 7) for row, p in enumerate(prompt_ids)]
        out = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, **extra}
        if offset is not None:
            batch = padded(prompt_ids, ids)
            with torch.no_grad():
                lp = token_logprobs(trainer.model, batch)[0]
            out["logprobs"] = [
                [lp[row, t].item() + offset(row, t) for t in range(len(row_ids))] for row, row_ids in enumerate(ids)
            ]
        return out

    return generate


def far_off(row: int, token: int) -> float:
    """How far the engine's log-probability is off, up to 0.6 nats, in both directions."""
    return 0.3 * ((row + 2 * token) % 5 - 2)


def test_log_probabilities_of_a_rollout_function_reach_the_metrics(tiny_model: str, tmp_path: Path) -> None:
    trainer = trained(
        tiny_model, tmp_path, by_completion, trainer={"rollout_func": rollout(offset=far_off)}, **ACCUMULATED
    )
    mask = trainer.scored[0]["completion_mask"].bool()
    off = torch.tensor([[far_off(row, t) for t in range(mask.shape[1])] for row in range(8)])[mask]
    assert logged(trainer, "token_mult_prob_error") == pytest.approx([off.abs().exp().mean().item()], rel=1e-4)
    # k3 of KL(gen || prev), with x = prev - gen = -off.
    assert logged(trainer, "gen_kl_error") == pytest.approx([((-off).exp() - 1 + off).mean().item()], rel=1e-3)
    assert logged(trainer, "sampling_importance_ratio") == pytest.approx([(-off).exp().mean().item()], rel=1e-4)


def test_nothing_is_logged_about_an_engine_that_said_nothing(tiny_model: str, tmp_path: Path) -> None:
    trainer = trained(tiny_model, tmp_path, by_completion, trainer={"rollout_func": rollout()})
    assert not {"token_mult_prob_error", "gen_kl_error"} & set(trainer.state.log_history[0])


@pytest.mark.parametrize(
    ("knobs", "weight"),
    [
        ({}, lambda w: w),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.2},
            lambda w: w.clamp(0, 1.2),
        ),
        (
            {
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.8,
            },
            lambda w: torch.where((w >= 0.8) & (w <= 1.2), w, 0.0),
        ),
    ],
)
def test_importance_sampling_correction_weighs_every_token(
    tiny_model: str, tmp_path: Path, knobs: dict[str, Any], weight: Any
) -> None:
    trainer = trained(
        tiny_model,
        tmp_path,
        by_completion,
        trainer={"rollout_func": rollout(offset=far_off)},
        loss_fn={"use_importance_sampling_correction": True} | knobs,
        **ACCUMULATED,
    )
    batches = rows_of(trainer, accumulation=2)

    def loss(model: Any) -> Tensor:
        total = 0.0
        for b in batches:
            w = torch.exp(token_logprobs(model, b)[0].detach() - b["sampling_per_token_logps"])
            total = total + on_policy_loss(b, model, weight(w))
        return total / tokens(*batches)

    check_gradient(trainer, loss)


def test_fields_of_a_rollout_function_reach_the_reward(tiny_model: str, tmp_path: Path) -> None:
    def reward(score: list[float], **_: Any) -> dict[str, list[float]]:
        return {"score": score}

    extra = {"score": [1.0, 0, 0, 0, 0, 0, 0, 2.0]}
    trainer = trained(tiny_model, tmp_path, reward, trainer={"rollout_func": rollout(**extra)}, adv_estimator=CENTRED)
    assert trainer.scored[0]["advantages"].tolist() == [0.75, -0.25, -0.25, -0.25, -0.5, -0.5, -0.5, 1.5]


# Tools and their masks


def words(text: str) -> list[int]:
    return make_tokenizer()(text)["input_ids"]


ANSWERS_WITH_TOOL_OUTPUT = [words("a b 1 2 c <eos>")] * 3 + [words("d e <eos>")] + [words("f 3 4 <eos>")] * 4
TOOL_MASK = [[1, 1, 0, 0, 1, 1]] * 3 + [[1, 1, 1]] + [[1, 0, 0, 1]] * 3 + [[0, 0, 0, 0]]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("estimator", [CENTRED, {"name": "reinforce_plus_plus"}])
def test_tokens_of_a_tool_do_not_train(
    tiny_model: str, tmp_path: Path, loss_type: str, estimator: dict[str, Any]
) -> None:
    trainer = trained(
        tiny_model,
        tmp_path,
        constant([1.0, 0, 0, 0, 2, 0, 1, 9]),
        trainer={"rollout_func": rollout(ANSWERS_WITH_TOOL_OUTPUT, env_mask=TOOL_MASK)},
        loss_type=loss_type,
        adv_estimator=estimator,
        **ACCUMULATED,
    )
    batches = rows_of(trainer, accumulation=2)
    masks = [b["completion_mask"] * b["tool_mask"] for b in batches]
    valid_tokens, valid_rows = sum(m.sum().item() for m in masks), sum(m.any(1).sum().item() for m in masks)
    assert (valid_tokens, valid_rows) == (3 * 4 + 3 + 3 * 2, 7)

    def loss(model: Any) -> Tensor:
        if loss_type == "dapo":
            return sum(on_policy_loss(b, model, mask=m) for b, m in zip(batches, masks, strict=True)) / valid_tokens
        weights = [1 / m.sum(1, keepdim=True).clamp(min=1) for m in masks]
        parts = (on_policy_loss(b, model, w, m) for b, w, m in zip(batches, weights, masks, strict=True))
        return sum(parts) / valid_rows

    check_gradient(trainer, loss)
    scored = trainer.scored[0]
    if estimator is CENTRED:
        # Row 7 has no token of the model, so that its 9 does not count: the mean of 2, 0, 1 is 1.
        assert scored["advantages"].tolist() == [0.75, -0.25, -0.25, -0.25, 1, -1, 0, 0]
    else:
        assert scored["advantages"][7].abs().sum() == 0
    assert logged(trainer, "num_valid_samples") == [7]


def test_what_a_tool_said_last_does_not_change_the_gradient(tiny_model: str, tmp_path: Path) -> None:
    # The last tokens have no successor: the tool's words could only show through their own log-probabilities.
    def step(said: str, mask: list[int]) -> Tensor:
        answers = [words(f"a b {said}")] * 8
        tool = {"rollout_func": rollout(answers, env_mask=[mask] * 8)}
        return trained(tiny_model, tmp_path, constant([1.0, 0, 0, 0] * 2), trainer=tool).watch.gradients[0]

    assert difference(step("1 2 3", [1, 1, 0, 0, 0]), step("4 5 6", [1, 1, 0, 0, 0])) < 1e-6
    assert difference(step("1 2 3", [1, 1, 1, 1, 1]), step("4 5 6", [1, 1, 1, 1, 1])) > 1e-2


class CallsATool(GivenRollouts):
    """The first generation of each group calls `double(3)` and then answers; the others answer at once."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        call = self.processing_class.convert_tokens_to_ids(TOOL_CALL)
        if len(prompt_ids) == 8:
            return [call if row % 4 == 0 else [10 + row, EOS] for row in range(8)], None
        return [[20, EOS] for _ in prompt_ids], None


def double(x: int) -> int:
    """Doubles a number.

    Args:
        x: the number.

    Returns:
        Twice the number.
    """
    return 2 * x


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tool_is_called_and_its_answer_is_masked(tiny_model: str, tmp_path: Path, asynchronous: bool) -> None:
    async def double_slowly(x: int) -> int:
        return 2 * x

    double_slowly.__doc__, double_slowly.__name__ = double.__doc__, "double"

    def used_tool(completions: list[Any], **_: Any) -> dict[str, list[float]]:
        answers = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]
        return {"used": [float(bool(a)) for a in answers], "right": [float(a == ["6"]) for a in answers]}

    trainer = trained(
        tiny_model,
        tmp_path,
        used_tool,
        mixin=CallsATool,
        dataset=chat(),
        trainer={"tools": [double_slowly if asynchronous else double], "processing_class": tool_tokenizer()},
        adv_estimator=CENTRED,
        max_completion_length=32,
        **ACCUMULATED,
    )
    scored = trainer.scored[0]
    assert scored["reward/right"].tolist() == [1, 0, 0, 0] * 2
    assert scored["advantages"].tolist() == [1.5, -0.5, -0.5, -0.5] * 2
    assert logged(trainer, "tools/call_frequency") == [0.25]
    # Four tokens of the call, those of the tool's turn (six of them: its header, 6, <eos> and the next header), two.
    tool_turn = trainer.processing_class("<|im_start|> tool 6 <eos> <|im_start|> assistant")["input_ids"]
    assert scored["completion_ids"][0, 4 : 4 + len(tool_turn)].tolist() == tool_turn
    assert scored["tool_mask"][0].tolist() == [1] * 4 + [0] * len(tool_turn) + [1] * 2
    batches = rows_of(trainer, accumulation=2)
    masks = [b["completion_mask"] * b["tool_mask"] for b in batches]
    count = sum(m.sum().item() for m in masks)
    assert count == 2 * (4 + 2) + 6 * 2
    check_gradient(
        trainer,
        lambda model: sum(on_policy_loss(b, model, mask=m) for b, m in zip(batches, masks, strict=True)) / count,
    )


def test_an_environment_is_called_as_a_tool_and_scores_from_its_state(tiny_model: str, tmp_path: Path) -> None:
    class Desk:
        def reset(self, **_: Any) -> None:
            self.results: list[int] = []

        def double(self, x: int) -> int:
            """Doubles a number.

            Args:
                x: the number.

            Returns:
                Twice the number.
            """
            self.results.append(2 * x)
            return 2 * x

        def get_reward(self) -> dict[str, float]:
            return {"calls": float(len(self.results)), "total": float(sum(self.results))}

    trainer = trained(
        tiny_model,
        tmp_path,
        None,
        mixin=CallsATool,
        dataset=chat(),
        trainer={"environment_factory": Desk, "processing_class": tool_tokenizer()},
        adv_estimator=CENTRED,
        max_completion_length=32,
    )
    assert trainer.scored[0]["reward/calls"].tolist() == [1, 0, 0, 0] * 2
    assert trainer.scored[0]["reward/total"].tolist() == [6, 0, 0, 0] * 2
    assert logged(trainer, "rewards/total/mean") == [1.5]


# Entropy


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_entropy_bonus_is_the_mean_over_all_tokens_of_the_step(
    tiny_model: str, tmp_path: Path, loss_type: str
) -> None:
    runs = [
        trained(tiny_model, tmp_path, by_completion, loss_type=loss_type, entropy_coef=coef, **ACCUMULATED)
        for coef in (0.0, 0.5)
    ]
    batches = rows_of(runs[1], accumulation=2)
    assert tokens(batches[0]) != tokens(batches[1])

    def entropy(model: Any) -> Tensor:
        total = sum((token_logprobs(model, b)[1] * b["completion_mask"]).sum() for b in batches)
        return total / tokens(*batches)

    with weights_of(runs[1], 0) as model:
        expected, slope = entropy(model).item(), gradient(entropy(model), model)
    (without,), (with_bonus,) = logged(runs[0], "loss"), logged(runs[1], "loss")
    assert with_bonus - without == pytest.approx(-0.5 * expected, abs=1e-4)
    assert difference(runs[1].watch.gradients[0] - runs[0].watch.gradients[0], -0.5 * slope) < 1e-4
    assert logged(runs[1], "entropy") == logged(runs[0], "entropy") == pytest.approx([expected], rel=1e-4)
    assert logged(runs[1], "entropy_coef") == [0.5]


ADAPTIVE = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.1,
    "entropy_coef_delta": 0.01,
    "entropy_coef_max": 1.0,
    "learning_rate": 1e-5,
    "save_strategy": "steps",
    "save_steps": 1,
}


@pytest.mark.parametrize(("target", "way"), [(100.0, 1), (1e-4, -1)])
def test_the_adaptive_coefficient_moves_and_survives_a_restart(
    tiny_model: str, tmp_path: Path, target: float, way: int
) -> None:
    args = ADAPTIVE | {"entropy_target": target}
    first = trained(tiny_model, tmp_path, by_completion, max_steps=2, **args)
    assert logged(first, "entropy_coef") == pytest.approx([0.1 + way * 0.01, 0.1 + way * 0.02])
    state = json.loads((tmp_path / "checkpoint-2" / "entropy_ctrl_state.json").read_text())
    assert state["entropy_coef"] == pytest.approx(0.1 + way * 0.02)
    assert state["last_world_entropy"] == pytest.approx(logged(first, "entropy")[1], rel=1e-5)

    again = make_trainer(tiny_model, tmp_path, by_completion, max_steps=3, **args)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(again, "entropy_coef")[2] == pytest.approx(0.1 + way * 0.03)


def test_the_adaptive_bonus_waits_for_a_measurement_and_stops_above_the_target(tiny_model: str, tmp_path: Path) -> None:
    def gradients(**args: Any) -> list[Tensor]:
        return trained(tiny_model, tmp_path, by_completion, max_steps=2, learning_rate=1e-5, **args).watch.gradients

    plain = gradients()
    low = gradients(use_adaptive_entropy=True, entropy_coef=0.5, entropy_target=100.0, entropy_coef_max=1.0)
    high = gradients(use_adaptive_entropy=True, entropy_coef=0.5, entropy_target=1e-4, entropy_coef_max=1.0)
    assert difference(low[0], plain[0]) < 1e-6  # nothing is measured before the first step
    assert difference(low[1], plain[1]) > 1e-3
    assert difference(high[1], plain[1]) < 1e-6


def perturbed(trainer: Any, size: float = 0.005) -> Any:
    """The trainer with a reference that differs from the policy, as after some training."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in trainer.ref_model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * size)
    return trainer


def kl_term(lp: Tensor, ref: Tensor) -> Tensor:
    """k3 of each token, weighted by the ratio (1 on-policy, but with a gradient), as TRL does by default."""
    return torch.exp(lp - lp.detach()) * (torch.exp(ref - lp) - 1 - (ref - lp))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_only_tokens_of_high_entropy_feel_the_policy_gradient(tiny_model: str, tmp_path: Path, loss_type: str) -> None:
    trainer = perturbed(
        make_trainer(tiny_model, tmp_path, by_completion, loss_type=loss_type, top_entropy_quantile=0.3, beta=0.1)
    )
    trainer.train()
    (batch,) = rows_of(trainer)
    mask = batch["completion_mask"].bool()
    per_row = 1 / (mask.sum(1, keepdim=True) * 8) if loss_type == "grpo" else 1 / mask.sum()

    def loss(model: Any) -> Tensor:
        lp, entropy = token_logprobs(model, batch)
        active = mask & (entropy >= torch.quantile(entropy[mask], 0.7))
        assert 0 < active.sum() < 0.4 * mask.sum()
        # The KL is about all tokens, and so are the denominators.
        kl = kl_term(lp, batch["ref_per_token_logps"])
        return on_policy_loss(batch, model, per_row, active) + 0.1 * (kl * mask * per_row).sum()

    check_gradient(trainer, loss)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_rows_far_off_policy_with_a_negative_advantage_are_masked(
    tiny_model: str, tmp_path: Path, loss_type: str
) -> None:
    # The engine gave the even rows 0.3 nats more a token than the policy does, the odd ones 0.1.
    trainer = trained(
        tiny_model,
        tmp_path,
        by_completion,
        trainer={"rollout_func": rollout(offset=lambda row, token: 0.3 if row % 2 == 0 else 0.1)},
        loss_type=loss_type,
        off_policy_mask_threshold=0.2,
    )
    (batch,) = rows_of(trainer)
    mask = batch["completion_mask"]
    per_row = 1 / (mask.sum(1, keepdim=True) * 8) if loss_type == "grpo" else 1 / mask.sum()

    def loss(model: Any) -> Tensor:
        off = ((batch["sampling_per_token_logps"] - token_logprobs(model, batch)[0]).detach() * mask).sum(1) / mask.sum(
            1
        )
        kept = (batch["advantages"] >= 0) | (off <= 0.2)
        assert 0 < kept.sum() < 8
        return on_policy_loss(batch, model, per_row * kept[:, None])

    check_gradient(trainer, loss)


# The same as TRL


def assert_trains_like_trl(build: Any, steps: int = 2) -> Any:
    """Stock TRL and ours take the same steps."""
    pair = []
    for cls in (GRPOTrainer, GRPOExtTrainer):
        pair.append(build(cls))  # which sets the seed that shuffles the rows
        pair[-1].train()
        assert len(pair[-1].watch.gradients) == steps
    stock, ours = pair
    for step in range(steps):
        assert stock.watch.gradients[step].norm() > 1e-3
        assert difference(ours.watch.gradients[step], stock.watch.gradients[step]) < 1e-5
    before = flat(stock.watch.weights[0].values())
    changes = [flat(p for p in trainer.model.parameters()) - before for trainer in (ours, stock)]
    assert difference(*changes) < 1e-4
    return stock, ours


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_router_of_a_mixture_of_experts_is_balanced(tmp_path: Path, loss_type: str) -> None:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        pad_token_id=0,
        eos_token_id=1,
        router_aux_loss_coef=0.5,
    )
    model = Qwen2MoeForCausalLM(config)
    model.lm_head.weight.data.mul_(20)
    model.save_pretrained(tmp_path / "moe")
    make_tokenizer().save_pretrained(tmp_path / "moe")

    def build(cls: type, **args: Any) -> Any:
        return make_trainer(
            str(tmp_path / "moe"),
            tmp_path,
            by_completion,
            cls=cls,
            max_steps=2,
            learning_rate=1e-2,
            loss_type=loss_type,
            **(ACCUMULATED | args),
        )

    stock, ours = assert_trains_like_trl(build)
    assert logged(ours, "aux_loss") == pytest.approx(logged(stock, "aux_loss"), rel=1e-5)
    without = build(GRPOExtTrainer, router_aux_loss_coef=0.0)
    without.train()
    assert difference(without.watch.gradients[0], ours.watch.gradients[0]) > 1e-3
    assert "aux_loss" not in without.state.log_history[0]


@pytest.mark.parametrize("family", [tiny_llava, tiny_qwen2_vl])
def test_images_train_the_vision_tower(tmp_path: Path, family: Any) -> None:
    def build(cls: type, **args: Any) -> Any:
        model, processor = family()
        return make_trainer(
            model,
            tmp_path,
            by_completion,
            cls=cls,
            dataset=pictures(PROMPTS),
            trainer={"processing_class": processor},
            max_steps=2,
            learning_rate=1e-3,
            **(ACCUMULATED | args),
        )

    _, ours = assert_trains_like_trl(build)
    sizes = [p.numel() for p in ours.model.parameters()]
    parts = zip(ours.model.named_parameters(), ours.watch.gradients[0].split(sizes), strict=True)
    assert max(g.norm().item() for (name, _), g in parts if "patch_embed" in name) > 1e-2
    # Rows are split by the number of their images: the second prompt has two.
    other = build(GRPOExtTrainer, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    other.train()
    assert difference(other.watch.gradients[0], ours.watch.gradients[0]) < 1e-5


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trls_own_correction_for_vllm(tiny_model: str, tmp_path: Path, mode: str) -> None:
    class Engine(GivenRollouts):
        """What vLLM would return: completions, and log-probabilities that are a little off."""

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return ids, rollout(ids, far_off)(self._prompts, self)["logprobs"]

        def _generate(self, prompts: Any) -> Any:
            self._prompts = prompts
            return super()._generate(prompts)

    def build(cls: type) -> Any:
        trainer = make_trainer(
            tiny_model,
            tmp_path,
            by_completion,
            cls=cls,
            mixin=Engine,
            max_steps=2,
            learning_rate=1e-3,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=1.5,
            vllm_importance_sampling_clip_min=0.6,
            **ACCUMULATED,
        )
        trainer.use_vllm = True  # no vLLM here: only what comes after generation
        return trainer

    _, ours = assert_trains_like_trl(build)
    ratios = ours.trained[0]["importance_sampling_ratio"]
    assert ratios.std() > 0.1


# Truncated completions


class Truncates(GivenRollouts):
    truncated = staticmethod(lambda rank: rank == 1)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_truncated_rows_neither_vote_nor_train(tiny_model: str, tmp_path: Path, loss_type: str, beta: float) -> None:
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        constant([1.0, 9, 0, 2, 0, 9, 0, 3]),
        mixin=Truncates,
        mask_truncated_completions=True,
        adv_estimator=CENTRED,
        loss_type=loss_type,
        beta=beta,
        **ACCUMULATED,
    )
    if beta:
        perturbed(trainer)
    trainer.train()
    assert trainer.scored[0]["advantages"].tolist() == [0, 0, -1, 1, -1, 0, -1, 2]
    assert logged(trainer, "completions/clipped_ratio") == [0.25]
    assert logged(trainer, "num_valid_samples") == [6]
    batches = rows_of(trainer, accumulation=2)

    def loss(model: Any) -> Tensor:
        total = 0.0
        for b in batches:
            rows = b["completion_mask"].any(1)
            b = {key: b[key][rows] for key in b if torch.is_tensor(b[key]) and b[key].dim()}
            mask = b["completion_mask"]
            per_row = 1 / (6 * mask.sum(1, keepdim=True)) if loss_type == "grpo" else 1 / tokens(*batches)
            total = total + on_policy_loss(b, model, per_row)
            if beta:
                kl = kl_term(token_logprobs(model, b)[0], b["ref_per_token_logps"])
                total = total + beta * (kl * mask * per_row).sum()
        return total

    check_gradient(trainer, loss)


def test_a_step_of_truncated_rows_changes_nothing_and_logs_finite_numbers(tiny_model: str, tmp_path: Path) -> None:
    class AllTruncated(GivenRollouts):
        truncated = staticmethod(lambda rank: True)

    trainer = trained(
        tiny_model, tmp_path, by_completion, mixin=AllTruncated, mask_truncated_completions=True, entropy_coef=0.1
    )
    assert trainer.watch.gradients[0].abs().max() == 0
    assert trainer.state.log_history[0]["loss"] == 0
    bad = {k: v for k, v in trainer.state.log_history[0].items() if v is not None and not math.isfinite(v)}
    assert not bad  # JSON has no infinity


# Evaluation


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_evaluation_with_another_number_of_generations(tiny_model: str, tmp_path: Path, estimator: str) -> None:
    def components(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float]]:
        return {"length": [float(len(ids)) for ids in completion_ids], "value": by_completion(completion_ids)}

    trainer = make_trainer(
        tiny_model,
        tmp_path,
        components,
        trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[2:6]})},
        adv_estimator=CENTRED | {"name": estimator} if estimator != "reinforce_plus_plus" else estimator,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    train_batch, *eval_batches = trainer.scored
    assert len(train_batch["advantages"]) == 8
    assert [len(batch["advantages"]) for batch in eval_batches] == [4, 4]  # two groups of two, twice
    (entry,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    lengths = torch.cat([batch["reward/length"] for batch in eval_batches])
    assert entry["eval_rewards/length/mean"] == pytest.approx(lengths.mean().item())
    assert logged(trainer, "rewards/length/mean") == pytest.approx([train_batch["reward/length"].mean().item()])

    losses, entropies = [], []
    for batch in eval_batches:
        with torch.no_grad():
            losses.append(on_policy_loss(batch, trainer.model).item() / tokens(batch))
            entropies.append((token_logprobs(trainer.model, batch)[1] * batch["completion_mask"]).sum() / tokens(batch))
        if estimator == "grpo":
            totals = (batch["reward/length"] + batch["reward/value"]).view(2, 2)
            assert batch["advantages"].tolist() == pytest.approx(
                (totals - totals.mean(1, keepdim=True)).flatten().tolist()
            )
    assert entry["eval_loss"] == pytest.approx(mean(losses), abs=1e-5)
    assert entry["eval_entropy"] == pytest.approx(torch.stack(entropies).mean().item(), rel=1e-4)
    assert not [key for key in entry if key.startswith("rewards/")]


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "reinforce_plus_plus"])
def test_evaluation_with_one_generation_has_rewards_and_no_advantages(
    tiny_model: str, tmp_path: Path, estimator: str
) -> None:
    def components(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float]]:
        return {"length": [float(len(ids)) for ids in completion_ids], "value": by_completion(completion_ids)}

    trainer = make_trainer(
        tiny_model,
        tmp_path,
        components,
        trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[2:6]})},
        adv_estimator=estimator,
        num_generations_eval=1,
        per_device_eval_batch_size=4,
    )
    metrics = trainer.evaluate()
    assert trainer.scored[0]["advantages"].abs().max() == 0
    assert metrics["eval_loss"] == 0
    assert metrics["eval_rewards/length/mean"] == trainer.scored[0]["reward/length"].mean().item()


def test_completions_are_logged_with_the_rewards_and_advantages_that_trained(tiny_model: str, tmp_path: Path) -> None:
    answer = {"right": [1.0, 0, 0, 0] * 2, "short": [0.0, None, 2, 2] * 2}

    def score(log_extra: Any, log_metric: Any, **_: Any) -> Any:
        log_extra("note", list("abcdefgh"))
        log_metric("seen", 8.0)
        return answer

    trainer = trained(
        tiny_model, tmp_path, score, adv_estimator=CENTRED, log_completions=True, reward_weights={"short": 0.5}
    )
    frame = table(tmp_path, 1)
    assert sorted(frame.columns) == ["advantage", "completion", "note", "prompt", "right", "short", "step"]
    assert frame["right"].tolist() == answer["right"]
    assert frame["short"].tolist() == pytest.approx(numbers(answer["short"]), nan_ok=True)
    assert frame["advantage"].tolist() == [0.25, -0.75, 0.25, 0.25] * 2  # totals [1, 0, 1, 1]
    assert frame["prompt"].tolist() == [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4
    ids = trainer.scored[0]["completion_ids"]
    assert frame["completion"].tolist() == trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    assert frame["note"].tolist() == list("abcdefgh")
    assert logged(trainer, "seen") == [8.0]


def test_the_logged_advantage_of_a_row_is_the_mean_of_its_tokens(tiny_model: str, tmp_path: Path) -> None:
    trainer = trained(tiny_model, tmp_path, by_completion, adv_estimator="reinforce_plus_plus", log_completions=True)
    batch = trainer.scored[0]
    rows = (batch["advantages"] * batch["completion_mask"]).sum(1) / batch["completion_mask"].sum(1)
    assert table(tmp_path, 1)["advantage"].tolist() == pytest.approx(rows.tolist(), abs=1e-6)


# Windows: how generations, micro-batches and optimizer steps interlock


def ppo_loss(batch: dict[str, Any], lp: Tensor, prev: Tensor, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    """`(L per token, where it was clipped)`."""
    ratio, advantages = torch.exp(lp - prev), batch["advantages"][:, None]
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def test_the_second_pass_over_a_rollout_is_off_policy(tiny_model: str, tmp_path: Path) -> None:
    trainer = trained(
        tiny_model, tmp_path, by_completion, num_iterations=2, max_steps=2, learning_rate=0.01, **ACCUMULATED
    )
    assert len(trainer.scored) == 1
    batches = rows_of(trainer, 1, accumulation=2)
    with weights_of(trainer, 0) as model, torch.no_grad():
        prevs = [token_logprobs(model, b)[0] for b in batches]
    clips = []

    def loss(model: Any) -> Tensor:
        total = 0.0
        for b, prev in zip(batches, prevs, strict=True):
            per_token, clipped = ppo_loss(b, token_logprobs(model, b)[0], prev)
            clips.append((clipped & b["completion_mask"].bool()).sum().item())
            total = total + (per_token * b["completion_mask"]).sum()
        return total / tokens(*batches)

    check_gradient(trainer, loss, step=1)
    assert sum(clips) > 0  # or the clip was not seen
    low, high = logged(trainer, "clip_fraction_low")[1], logged(trainer, "clip_fraction_high")[1]
    assert low + high == pytest.approx(sum(clips) / tokens(*batches), rel=1e-4)


@pytest.mark.parametrize(
    ("args", "steps", "generations"),
    [
        ({"num_iterations": 2, **ACCUMULATED}, 4, 2),
        # One generation batch of 16 rows lasts two optimizer steps of 8.
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}, 4, 2),
        # An optimizer step of 16 rows takes two generation batches of 8.
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, 2, 4),
        # Neither divides the other: the second step takes the end of one generation batch and the start of the next.
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3}, 3, 2),
    ],
)
def test_generation_batches_and_optimizer_steps_interlock_as_in_trl(
    tiny_model: str, tmp_path: Path, args: dict[str, Any], steps: int, generations: int
) -> None:
    def build(cls: type) -> Any:
        return make_trainer(
            tiny_model,
            tmp_path,
            by_completion,
            cls=cls,
            loss_type="grpo",  # its denominator is the same in TRL, whatever the windows
            max_steps=steps,
            learning_rate=1e-3,
            **args,
        )

    _, ours = assert_trains_like_trl(build, steps)
    assert len(ours.scored) == generations


@pytest.mark.parametrize(
    ("args", "stop"),
    [
        ({"num_iterations": 2}, 2),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}, 2),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, 1),
        # In the middle of a generation batch, where TRL draws it again and takes its first part (cases.md 34).
        ({"num_iterations": 2}, 1),
        ({"num_iterations": 2}, 3),
        ({"num_iterations": 3, "beta": 0.1}, 2),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}, 1),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}, 3),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "steps_per_generation": 2}, 1),
    ],
)
def test_a_run_that_is_resumed_takes_the_same_steps(
    tiny_model: str, tmp_path: Path, args: dict[str, Any], stop: int
) -> None:
    args = args | {"max_steps": 4, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": stop}
    whole = trained(tiny_model, tmp_path, by_completion, **args)
    rest = make_trainer(tiny_model, tmp_path, by_completion, **args)
    rest.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert len(rest.watch.gradients) == 4 - stop
    for again, first in zip(rest.watch.gradients, whole.watch.gradients[stop:], strict=True):
        assert difference(again, first) < 1e-5


def test_a_stream_of_prompts_trains_as_in_trl(tiny_model: str, tmp_path: Path) -> None:
    def build(cls: type) -> Any:
        stream = Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset()
        return make_trainer(
            tiny_model, tmp_path, by_completion, cls=cls, dataset=stream, max_steps=3, learning_rate=1e-3, **ACCUMULATED
        )

    assert_trains_like_trl(build, steps=3)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_a_step_that_is_part_of_a_generation_batch_counts_its_own_tokens(
    tiny_model: str, tmp_path: Path, loss_type: str
) -> None:
    trainer = trained(
        tiny_model,
        tmp_path,
        by_completion,
        loss_type=loss_type,
        max_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
    )
    windows = [rows_of(trainer, step, accumulation=2) for step in range(2)]
    assert tokens(*windows[0]) != tokens(*windows[1])
    with weights_of(trainer, 0) as model, torch.no_grad():
        prevs = [token_logprobs(model, b)[0] for b in windows[1]]

    def loss(model: Any) -> Tensor:
        total = 0.0
        for b, prev in zip(windows[1], prevs, strict=True):
            mask = b["completion_mask"]
            weight = {"grpo": 1 / (4 * mask.sum(1, keepdim=True)), "dr_grpo": 1 / (4 * 8)}.get(
                loss_type, 1 / tokens(*windows[1])
            )
            total = total + (ppo_loss(b, token_logprobs(model, b)[0], prev)[0] * mask * weight).sum()
        return total

    check_gradient(trainer, loss, step=1)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_short_last_window_of_an_epoch(tiny_model: str, tmp_path: Path, loss_type: str) -> None:
    # Three micro-batches and an accumulation of two: the second step has one, and is as long a step as the first.
    trainer = trained(
        tiny_model,
        tmp_path,
        by_completion,
        dataset=Dataset.from_dict({"prompt": PROMPTS[:6]}),
        loss_type=loss_type,
        max_steps=-1,
        num_train_epochs=1,
        learning_rate=1e-3,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        entropy_coef=0.1,
    )
    assert len(trainer.watch.gradients) == 2
    (batch,) = trainer.trained[2:]

    def loss(model: Any) -> Tensor:
        mask = batch["completion_mask"]
        weight = {"grpo": 1 / (8 * mask.sum(1, keepdim=True)), "dr_grpo": 1 / (8 * 8)}.get(loss_type, 1 / mask.sum())
        bonus = (token_logprobs(model, batch)[1] * mask).sum() / mask.sum()
        return on_policy_loss(batch, model, weight) - 0.1 * bonus

    check_gradient(trainer, loss, step=1, tolerance=2e-5)


def test_metrics_of_tokens_are_means_over_tokens_whatever_the_loss_divides_by(tiny_model: str, tmp_path: Path) -> None:
    def build(loss_type: str) -> Any:
        return make_trainer(
            tiny_model,
            tmp_path,
            by_completion,
            trainer={"rollout_func": rollout(offset=far_off)},
            loss_type=loss_type,
            beta=0.1,
            **ACCUMULATED,
        )

    entries = []
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        trainer = perturbed(build(loss_type))
        trainer.train()
        entries.append(trainer.state.log_history[0])
    assert entries[0]["kl"] > 1e-3
    for entry in entries:
        assert entry["probs_ratio"] == pytest.approx(1)
        for name in ("entropy", "token_mult_prob_error", "approx_entropy"):
            assert entry[name] == pytest.approx(entries[0][name], rel=1e-4), name
    assert entries[2]["kl"] == pytest.approx(entries[0]["kl"], rel=1e-4)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_metrics_under_trls_names_have_trls_values(tiny_model: str, tmp_path: Path, loss_type: str) -> None:
    def build(cls: type) -> Any:
        # One micro-batch a step: over several, TRL averages means.
        return make_trainer(
            tiny_model,
            tmp_path,
            by_completion,
            cls=cls,
            loss_type=loss_type,
            beta=0.1,
            num_iterations=2,
            max_steps=2,
            learning_rate=0.005,
        )

    entries = [trainer.state.log_history[1] for trainer in assert_trains_like_trl(build)]
    stock, ours = entries
    assert stock["kl"] > 1e-3
    assert stock["clip_ratio/low_mean"] + stock["clip_ratio/high_mean"] > 0.1
    for name in ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "loss"):
        assert ours[name] == pytest.approx(stock[name], rel=1e-4, abs=1e-6), name


# The KL in the reward, advantages a token


@pytest.mark.parametrize("micro_batches", [{}, ACCUMULATED])
def test_kl_in_the_reward_of_grpo(tiny_model: str, tmp_path: Path, micro_batches: dict[str, int]) -> None:
    trainer = perturbed(
        make_trainer(
            tiny_model,
            tmp_path,
            constant([1.0, 0, 0, 0] * 2),
            adv_estimator=CENTRED,
            beta=0.5,
            loss_fn={"use_kl_in_reward": True},
            **micro_batches,
        )
    )
    trainer.train()
    scored, batches = trainer.scored[0], rows_of(trainer, accumulation=len(micro_batches) or 1)
    with weights_of(trainer, 0) as model, torch.no_grad():
        kl = kl_term(token_logprobs(model, scored)[0], token_logprobs(trainer.ref_model, scored)[0])
    kl = (kl * scored["completion_mask"]).sum(1)
    rewards = torch.tensor([1.0, 0, 0, 0] * 2) - 0.5 * kl
    assert kl.std() > 0.01
    expected = rewards - rewards.view(2, 4).mean(1).repeat_interleave(4)
    torch.testing.assert_close(scored["advantages"], expected, rtol=1e-4, atol=1e-5)
    # No KL term in the loss: the advantages say it all.
    check_gradient(trainer, lambda model: sum(on_policy_loss(b, model) for b in batches) / tokens(*batches))
    assert "kl" not in trainer.state.log_history[0]


def test_the_pass_that_scores_the_kl_is_as_small_as_a_training_pass(tiny_model: str, tmp_path: Path) -> None:
    # A generation batch is many micro-batches long: in one piece it would not fit into memory.
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        by_completion,
        beta=0.5,
        loss_fn={"use_kl_in_reward": True},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        shared_prompt_forward=False,  # a packed batch is one row
    )
    rows: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainer.train()
    assert set(rows) == {2}


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_whitens_over_tokens(
    tiny_model: str, tmp_path: Path, beta: float, minus_baseline: bool
) -> None:
    loss_fn = {"use_kl_in_reward": True, "reference_policy_kl_type": "k2"} if beta else None
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        constant([1.0, 0, 0, 0] * 2),
        adv_estimator={"name": "reinforce_plus_plus", "minus_baseline": minus_baseline},
        beta=beta,
        loss_fn=loss_fn,
        **ACCUMULATED,
    )
    if beta:
        perturbed(trainer)
    trainer.train()
    scored, batches = trainer.scored[0], rows_of(trainer, accumulation=2)
    mask = scored["completion_mask"].bool()
    a = torch.tensor([0.75, -0.25, -0.25, -0.25] * 2 if minus_baseline else [1.0, 0, 0, 0] * 2)[:, None].expand(
        mask.shape
    )
    if beta:
        with weights_of(trainer, 0) as model, torch.no_grad():
            a = a - beta * (token_logprobs(trainer.ref_model, scored)[0] - token_logprobs(model, scored)[0]) ** 2 / 2
    expected = (a - a[mask].mean()) / a[mask].std(correction=0)
    torch.testing.assert_close(scored["advantages"][mask], expected[mask], rtol=1e-4, atol=1e-4)
    check_gradient(trainer, lambda model: sum(on_policy_loss(b, model) for b in batches) / tokens(*batches))


def test_the_kl_in_the_reward_without_a_reference_is_refused(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"use_kl_in_reward.*(beta|reference_policy_kl_penalty)"):
        trained(tiny_model, tmp_path, by_completion, loss_fn={"use_kl_in_reward": True})


# However the rows are split, the step is the same

LAYOUTS = [(8, 1), (4, 2), (2, 4), (1, 8)]
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "gspo": {"loss_fn": "gspo"},
    "gdpo": {"adv_estimator": "gdpo"},
    "reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus", "loss_fn": "reinforce_plus_plus"},
    "kl": {"beta": 0.1},
    "kl in reward": {"beta": 0.1, "loss_fn": {"use_kl_in_reward": True}},
    "entropy bonus": {"entropy_coef": 0.1},
    "truncated rows": {"mask_truncated_completions": True, "loss_type": "grpo"},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_step_does_not_depend_on_how_its_rows_are_split(tiny_model: str, tmp_path: Path, method: str) -> None:
    def components(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float]]:
        return {"length": [float(len(ids)) for ids in completion_ids], "value": by_completion(completion_ids)}

    changes, entries = [], []
    for rows, accumulation in LAYOUTS:
        trainer = make_trainer(
            tiny_model,
            tmp_path,
            components,
            mixin=Truncates if "truncated" in method else GivenRollouts,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            **METHODS[method],
        )
        if trainer.ref_model is not None:
            perturbed(trainer)
        trainer.train()
        assert len(trainer.trained) == accumulation
        changes.append(flat(trainer.model.parameters()) - flat(trainer.watch.weights[0].values()))
        entries.append(trainer.state.log_history[0])
    assert changes[0].norm() > 1e-2
    for change, entry in zip(changes[1:], entries[1:], strict=True):
        assert difference(change, changes[0]) < 1e-5
        # The metrics combine exactly as well.
        timing = {"step_time", "epoch"}
        assert entry.keys() == entries[0].keys()
        for key in entry.keys() - timing:
            assert entry[key] == pytest.approx(entries[0][key], rel=1e-3, abs=1e-5), key

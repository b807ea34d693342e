"""What a reward function may return, and how its names live through a run."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_grpo_ext import get_gdpo_reward_component_keys
from hf_grpo_ext.rewards import (
    AsyncComponentReward,
    ComponentNames,
    ComponentReward,
    component_weights,
    read_components,
)

NAN = float("nan")


@pytest.mark.parametrize(
    "answer",
    [
        [1.0, None, 0.5],
        (1, NAN, 0.5),
        torch.tensor([1.0, NAN, 0.5]),
        torch.tensor([1.0, NAN, 0.5], dtype=torch.bfloat16),
        np.array([1.0, NAN, 0.5]),
        [torch.tensor(1.0), None, np.float32(0.5)],
        [True, None, 0.5],
    ],
)
def test_numbers(answer: Any) -> None:
    kind, components = read_components(answer, "score", 3)
    assert kind == "numbers"
    np.testing.assert_equal(components, {"score": [1.0, NAN, 0.5]})


@pytest.mark.parametrize(
    "answer",
    [
        {"a": [1.0, None], "b": torch.tensor([0.0, 2.0])},
        [{"a": 1.0, "b": 0.0}, {"b": 2.0}],
        [{"a": 1, "b": 0}, {"a": None, "b": torch.tensor(2)}],
    ],
)
def test_named_components(answer: Any) -> None:
    kind, components = read_components(answer, "score", 2)
    assert kind == "named components"
    np.testing.assert_equal(components, {"a": [1.0, NAN], "b": [0.0, 2.0]})


def test_a_sample_without_a_dict_has_no_component() -> None:
    _, components = read_components([None, {"a": 1}], "score", 2)
    np.testing.assert_equal(components, {"a": [NAN, 1.0]})


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ([1.0], ValueError, "The reward function 'f' returned 1 values for 2 completions"),
        ([None], ValueError, "The reward function 'f' returned 1 values for 2 completions"),
        ({"a": [1.0]}, ValueError, "Component 'a' of the reward function 'f' returned 1 values for 2 completions"),
        ({"a": torch.zeros(2, 1)}, TypeError, "Component 'a' of the reward function 'f' holds"),
        ([{"a": 1}], ValueError, "returned 1 values for 2 completions"),
        ([{"a": 1}, 0.5], ValueError, "numbers for some samples and named components for others"),
        ({}, ValueError, "returned an empty dict"),
        ({1: [0, 0]}, TypeError, "named a component 1"),
        (["good", 1.0], TypeError, "holds 'good': a reward must be a number or None"),
        ([math.inf, 0], ValueError, "holds inf: a reward must be finite"),
        ([10**400, 0], ValueError, "holds inf: a reward must be finite"),
        ({1.0, 2.0}, TypeError, "The reward function 'f' returned set"),
        (1.0, TypeError, "The reward function 'f' returned float"),
        (None, TypeError, "The reward function 'f' returned NoneType"),
        ("no", TypeError, "The reward function 'f' returned str"),
        ({"a": 1.0}, TypeError, "Component 'a' of the reward function 'f' returned float"),
    ],
)
def test_bad_answers(answer: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        read_components(answer, "f", 2)


def test_the_caller_gets_one_number_a_sample() -> None:
    reward = ComponentReward(lambda **_: [{"a": 1.0, "b": 2.0}, None, {"b": 3.0}], "score")
    assert reward(completions=[0, 1, 2]) == [3.0, None, 3.0]
    np.testing.assert_equal(reward.components, {"a": [1.0, NAN, NAN], "b": [2.0, NAN, 3.0]})


def test_async_functions_are_awaited() -> None:
    async def score(completions: list[str], **_: Any) -> dict[str, list[float]]:
        await asyncio.sleep(0)
        return {"a": [1.0] * len(completions)}

    reward = AsyncComponentReward(score, "score")
    assert asyncio.run(reward(completions=["x", "y"])) == [1.0, 1.0]
    assert reward.components == {"a": [1.0, 1.0]}


def test_a_function_keeps_its_kind() -> None:
    answers = iter([[None, None], [1.0, 2.0], [None, None], {"a": [1.0, 2.0]}])
    reward = ComponentReward(lambda **_: next(answers), "score")
    assert reward(completions=[0, 1]) == [None, None]
    assert reward(completions=[0, 1]) == [1.0, 2.0]
    assert reward(completions=[0, 1]) == [None, None]
    with pytest.raises(ValueError, match="'score' returned named components now and numbers before"):
        reward(completions=[0, 1])


def test_names_are_the_union_and_only_grow() -> None:
    names = ComponentNames(["f", "g", "model"])
    assert names.names == ["f", "g", "model"]
    # Two processes that saw different components of g.
    names.update([[["f"], ["b"], []], [["f"], ["c", "a"], []]])
    assert names.names == ["f", "b", "a", "c", "model"]
    assert names.owners == [0, 1, 1, 1, 2]
    names.update([[[], [], []]])
    assert names.names == ["f", "b", "a", "c", "model"]


def test_local_columns_have_gaps_where_nothing_was_said() -> None:
    f, g = ComponentReward(lambda **_: None, "f"), ComponentReward(lambda **_: None, "g")
    f.components = {"a": [1.0, 2.0]}
    names = ComponentNames(["f", "g", "model"])
    names.update([[["a", "b"], [], []]])
    np.testing.assert_equal(names.local_columns([f, g, None], 2), [[1.0, 2.0], [NAN, NAN], [NAN, NAN], [NAN, NAN]])


def test_names_must_be_unique() -> None:
    with pytest.raises(ValueError, match="Two reward functions have the name '<lambda>'"):
        ComponentNames(["<lambda>", "<lambda>"])
    names = ComponentNames(["f", "g"])
    with pytest.raises(ValueError, match="Two reward components have the name 'f'"):
        names.update([[["f"], ["f"]]])


def test_weights_by_name() -> None:
    assert component_weights(["b", "a", "c"], {"b": 2, "a": 0.5}) == [2.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="names 'd', which is no reward component. The components are: b, a"):
        component_weights(["b", "a"], {"d": 1})


def test_component_keys_are_sorted() -> None:
    assert get_gdpo_reward_component_keys({"reward/b": 0, "rewards": 0, "reward/a": 0}) == ["reward/a", "reward/b"]

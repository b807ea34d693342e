"""What the worker of the asynchronous trainer makes of a group of rollouts."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_async import given_group, make_loop
from tiny_env import PROMPTS, G, quiet
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup

from hf_grpo_ext import AdvEstimatorConfig, get_advantage_estimator

pytestmark = quiet
DATASET = Dataset.from_dict({"prompt": PROMPTS[:3]})
TABLE: dict[str, list[float | None]] = {"right": [1.0, 0.0, 0.0, None], "brief": [0.2, 0.9, None, None]}
ROWS = [{"right": 1.0, "brief": 0.2}, {"right": 0.0, "brief": 0.9}, {"right": 0.0, "brief": None}, None]
GDPO = AdvEstimatorConfig(name="gdpo")


def by_name(**_: Any) -> Any:
    return TABLE


def by_sample(**_: Any) -> Any:
    return ROWS


async def later(**_: Any) -> Any:
    await asyncio.sleep(0)
    return TABLE


def right(**_: Any) -> Any:
    return TABLE["right"]


async def brief(**_: Any) -> Any:
    return TABLE["brief"]


class Scores:
    """An environment; the group has the answers of its `get_reward`."""

    def reset(self, **_: Any) -> None: ...

    def get_reward(self) -> Any: ...


def score(loop: Any, group: RolloutGroup | None = None) -> list[Any]:
    samples: list[Any] = asyncio.run(loop._score_group(group or given_group(PROMPTS[0], 0)))
    return samples


def expected(estimator: AdvEstimatorConfig, weights: dict[str, float] | None = None) -> list[float]:
    columns = {
        name: torch.tensor([math.nan if value is None else value for value in column], dtype=torch.float64)
        for name, column in TABLE.items()
    }
    relative = get_advantage_estimator(estimator).group_advantages(
        torch.zeros(G, dtype=torch.long), columns, reward_weights=weights
    )
    return relative.tolist()


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "reinforce_plus_plus"])
@pytest.mark.parametrize("form", ["by name", "by sample", "asynchronous", "two functions", "environment"])
def test_every_form_of_a_reward_gives_one_advantage(form: str, estimator: str) -> None:
    config = AdvEstimatorConfig(name=estimator)
    functions = {
        "by name": [by_name],
        "by sample": [by_sample],
        "asynchronous": [later],
        "two functions": [right, brief],
    }
    group = given_group(PROMPTS[0], 0)
    if form == "environment":
        group.env_rewards = [(Scores, row) for row in ROWS]
    loop = make_loop(
        functions.get(form, []),
        DATASET,
        adv_estimator=config,
        environment_factory=Scores if form == "environment" else None,
    )
    samples = score(loop, group)
    assert [s.advantage for s in samples] == pytest.approx(expected(config), nan_ok=True)
    assert math.isnan(samples[3].advantage)
    for sample, row in zip(samples, ROWS, strict=True):
        present = {name: value for name, value in (row or {}).items() if value is not None}
        for name in TABLE:
            assert sample.metrics[f"rewards/{name}"] == pytest.approx(present.get(name, math.nan), nan_ok=True)
        assert sample.metrics["reward"] == pytest.approx(sum(present.values()) if present else math.nan, nan_ok=True)
        assert {key for key in sample.metrics if key.startswith("rewards/")} == {"rewards/right", "rewards/brief"}


@pytest.mark.parametrize(
    ("functions", "weights", "by_component"),
    [
        ([by_name], [3.0], {"right": 3.0, "brief": 3.0}),
        ([right, brief], [2.0, 0.5], {"right": 2.0, "brief": 0.5}),
        ([by_name], {"brief": -1.0}, {"right": 1.0, "brief": -1.0}),
    ],
    ids=["one function", "two functions", "by name"],
)
def test_weights(functions: list[Any], weights: Any, by_component: dict[str, float]) -> None:
    samples = score(make_loop(functions, DATASET, reward_weights=weights))
    assert [s.advantage for s in samples] == pytest.approx(expected(AdvEstimatorConfig(), by_component), nan_ok=True)
    assert samples[0].metrics["reward"] == pytest.approx(by_component["right"] + 0.2 * by_component["brief"])


def test_an_environment_has_a_weight_after_the_functions() -> None:
    group = given_group(PROMPTS[0], 0)
    group.env_rewards = [(Scores, {"brief": value}) for value in TABLE["brief"]]
    loop = make_loop([right], DATASET, environment_factory=Scores, reward_weights=[2.0, 0.5])
    want = expected(AdvEstimatorConfig(), {"right": 2.0, "brief": 0.5})
    assert [s.advantage for s in score(loop, group)] == pytest.approx(want, nan_ok=True)


def test_weights_that_fit_nothing() -> None:
    with pytest.raises(ValueError, match=r"has 3 values for 2 sources of reward \(right, Scores\): give one for each"):
        make_loop([right], DATASET, environment_factory=Scores, reward_weights=[1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="reward_weights names 'bref', which is no reward component"):
        score(make_loop([by_name], DATASET, reward_weights={"bref": 1.0}))


def test_two_functions_of_one_name() -> None:
    with pytest.raises(ValueError, match="Two reward functions have the name 'right'"):
        make_loop([right, right], DATASET)
    with pytest.raises(ValueError, match="Two reward components have the name 'right'"):
        score(make_loop([right, by_name], DATASET))


def test_rows_of_one_conversation_share_its_advantage() -> None:
    group = given_group(PROMPTS[0], 0)
    group.completions_sequences[1] *= 2
    samples = score(make_loop([by_name], DATASET, adv_estimator=GDPO), group)
    want = expected(GDPO)
    assert [s.advantage for s in samples] == pytest.approx([want[0], want[1], *want[1:]], nan_ok=True)


def test_tools_are_logged_as_trl_does() -> None:
    group = given_group(PROMPTS[0], 0)
    group.tool_call_counts, group.tool_failure_counts = [2, 0, 1, 0], [1, 0, 0, 0]
    metrics = [s.metrics for s in score(make_loop([by_name], DATASET), group)]
    assert [m["tools/call_frequency"] for m in metrics] == [2, 0, 1, 0]
    assert [m["tools/failure_frequency"] for m in metrics] == [0.5, 0, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "rewards", "is_dropped"),
    [
        ("grpo", {"a": [1.0] * G, "b": [0.5] * G}, True),
        ("grpo", {"a": [1.0, 0.0, 1.0, 0.0], "b": [0.0, 1.0, 0.0, 1.0]}, True),  # the sums are equal
        ("gdpo", {"a": [1.0, 0.0, 1.0, 0.0], "b": [0.0, 1.0, 0.0, 1.0]}, False),
        ("gdpo", {"a": [1.0] * G, "b": [0.5] * G}, True),
        ("grpo", {"a": [None] * G, "b": [None] * G}, True),
        ("grpo", {"a": [1.0, None, None, None], "b": [None] * G}, True),
        ("grpo", {"a": [1.0, 0.0, None, None], "b": [None] * G}, False),
    ],
)
def test_what_a_group_without_signal_is(estimator: str, rewards: dict[str, Any], is_dropped: bool) -> None:
    for drops in (True, False):
        loop = make_loop(
            [lambda **_: rewards],
            DATASET,
            adv_estimator=AdvEstimatorConfig(name=estimator),
            drop_groups_without_signal=drops,
        )
        assert len(score(loop)) == (0 if drops and is_dropped else G)
        logged = [loop._metrics_queue.get_nowait() for _ in range(loop._metrics_queue.qsize())]
        assert logged[0]["frac_reward_zero_std"] == (float(is_dropped), 1.0)
        assert sum(entry.get("rollout/dropped_groups_total", 0) for entry in logged) == (drops and is_dropped)


def test_the_next_sample_tells_of_dropped_groups() -> None:
    answers = itertools.cycle([[1.0] * G, [1.0] * G, [0.0, 1.0, 0.0, 1.0]])
    loop = make_loop([lambda **_: next(answers)], DATASET, drop_groups_without_signal=True)
    told = [[s.dropped_groups for s in score(loop, given_group(PROMPTS[0], number))] for number in range(6)]
    assert told == [[], [], [(0, 1), (), (), ()], [], [], [(3, 4), (), (), ()]]


def test_a_pass_without_signal_is_an_error() -> None:
    loop = make_loop([lambda **_: [1.0] * G], DATASET, drop_groups_without_signal=True)
    assert [score(loop) for _ in range(2)] == [[], []]
    with pytest.raises(RuntimeError, match="No group of the last 3 .*, as many as the data set has prompts"):
        score(loop)


def test_a_stream_of_prompts_has_no_pass() -> None:
    stream = DATASET.to_iterable_dataset()
    loop = make_loop([lambda **_: [1.0] * G], stream, drop_groups_without_signal=True)
    assert [score(loop) for _ in range(9)] == [[]] * 9

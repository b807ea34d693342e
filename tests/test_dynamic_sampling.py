"""Dynamic sampling: every row of a step carries signal, the rounds are bounded, and the logs say what was drawn."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import save_tiny_model
from tiny_env import (
    CENTRED,
    PROMPTS,
    ROWS,
    G,
    GivenRollouts,
    chat,
    flat,
    given_completion,
    logged,
    make_trainer,
    quiet,
    scoring_environment,
    tool_tokenizer,
    trainable,
    trained,
)

from hf_grpo_ext import GRPOExtConfig
from hf_grpo_ext.dynamic_sampling import PromptStream, Rounds, groups_with_signal

pytestmark = quiet
GROUPS = 5
SILENT = PROMPTS[:3] + PROMPTS[5:8]  # 60% of the prompts of each batch


def varied(completion_ids: list[list[int]]) -> list[float]:
    return [hashlib.sha256(str(ids).encode()).digest()[0] / 64 for ids in completion_ids]


def mostly_silent(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for 60% of the prompts, whatever the completion; the others have rewards that differ."""
    return [1.0 if prompt in SILENT else score for prompt, score in zip(prompts, varied(completion_ids), strict=True)]


class Counting(GivenRollouts):
    """Counts the completions that were generated."""

    generated = 0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.generated += len(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


def silent(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def options(**more: Any) -> dict[str, Any]:
    return {
        "use_dynamic_sampling": True,
        "adv_estimator": CENTRED,
        "per_device_train_batch_size": GROUPS * G,
        "max_steps": 4,
        "learning_rate": 0.01,
        "mixin": Counting,
        **more,
    }


# Which groups, how many, whose turn


@given(
    needed=st.integers(1, 6),
    max_rounds=st.integers(1, 5),
    multiplier=st.floats(1, 3),
    whole=st.integers(1, 3),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_rounds_end_with_a_full_batch(
    needed: int, max_rounds: int, multiplier: float, whole: int, share: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    rounds = Rounds(needed, max_rounds, multiplier, whole)
    groups: list[tuple[int, bool]] = []  # of the pool: number of the group, whether it has signal
    while rounds.goes_on:
        size = rounds.next_size()
        assert size % whole == 0
        assert 0 < size <= multiplier * needed + whole
        signal = torch.rand(size, generator=random) < share
        groups += [(rounds.drawn + i, keep) for i, keep in enumerate(signal.tolist())]
        rounds.record(signal)
        groups = [groups[place] for place in rounds.take()]
        assert [number for number, _ in groups] == rounds.chosen()
    assert rounds.count <= max_rounds
    assert len(groups) == needed == len({number for number, _ in groups})
    metrics = rounds.metrics()
    assert sum(keep for _, keep in groups) == metrics["dynamic_sampling/kept"]
    assert metrics["dynamic_sampling/frac_rows_with_signal"] == 1 or rounds.count == max_rounds
    dropped = metrics["dynamic_sampling/dropped_without_signal"] + metrics["dynamic_sampling/dropped_surplus"]
    assert needed + dropped == rounds.drawn


def test_a_later_round_draws_what_is_expected_to_be_missing() -> None:
    rounds = Rounds(needed=8, max_rounds=9)
    rounds.record(torch.tensor([True] * 4 + [False] * 4))
    assert rounds.next_size() == 8  # four are missing, and every second has signal
    rounds.record(torch.tensor([True] * 3 + [False] * 5))
    assert rounds.next_size() == 3  # one is missing, 7 of 16 have signal


@given(size=st.integers(1, 7), counts=st.lists(st.integers(0, 9), max_size=4), seed=st.integers(0, 5))
def test_the_stream_goes_on_from_its_number(size: int, counts: list[int], seed: int) -> None:
    stream = PromptStream(size, seed)
    parts = [stream.take(count) for count in counts]
    whole = PromptStream(size, seed).take(sum(counts))
    assert [index for part in parts for index in part] == whole
    for start in range(0, len(whole) - size + 1, size):
        assert sorted(whole[start : start + size]) == list(range(size))  # each prompt once an epoch
    assert PromptStream(size, seed, drawn=stream.drawn).take(5) == stream.take(5)


def test_masked_rows_and_unused_components_are_no_signal() -> None:
    rewards = {"a": torch.tensor([1.0, 1.0, float("nan"), 1.0]), "b": torch.tensor([0.0, 1.0, 2.0, 2.0])}
    weights = {"a": 1.0, "b": 0.0}
    assert groups_with_signal(rewards, weights, 2, per_component=True).tolist() == [False, False]
    assert groups_with_signal(rewards, {"a": 1.0, "b": 1.0}, 2, per_component=True).tolist() == [True, False]


# In the trainer


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_every_row_of_a_step_has_signal(tiny_model: str, tmp_path: Path) -> None:
    without = trained(tiny_model, tmp_path / "a", mostly_silent, **options(use_dynamic_sampling=False, max_steps=5))
    trainer = trained(tiny_model, tmp_path / "b", mostly_silent, **options(max_steps=5))

    def share(run: Any) -> float:
        advantages = torch.cat([batch["advantages"] for batch in run.scored])
        return (advantages.view(-1, G) != 0).any(-1).float().mean().item()

    assert share(without) == pytest.approx(0.4)
    assert logged(without, "frac_reward_zero_std") == pytest.approx([0.6] * 5)
    assert share(trainer) == 1
    assert logged(trainer, "dynamic_sampling/frac_rows_with_signal") == [1] * 5
    rounds = logged(trainer, "dynamic_sampling/rounds")
    assert all(2 <= count <= 10 for count in rounds)
    assert logged(trainer, "dynamic_sampling/kept") == [GROUPS] * 5
    silent_groups = logged(trainer, "dynamic_sampling/dropped_without_signal")
    surplus = logged(trainer, "dynamic_sampling/dropped_surplus")
    drawn = [GROUPS + a + b for a, b in zip(silent_groups, surplus, strict=True)]
    assert logged(trainer, "frac_reward_zero_std") == pytest.approx(
        [a / n for a, n in zip(silent_groups, drawn, strict=True)], abs=1e-6
    )
    assert sum(drawn) * G == trainer.generated


def test_the_batch_and_the_table_of_completions_are_those_that_train(tiny_model: str, tmp_path: Path) -> None:
    trainer = trained(tiny_model, tmp_path, mostly_silent, **options(max_steps=1))
    batch, logs = trainer.scored[0], trainer._logs
    rewards = batch["reward/mostly_silent"].view(GROUPS, G)
    expected = (rewards - rewards.mean(-1, keepdim=True)).flatten()
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=1e-5)
    assert list(logs["advantages"]) == pytest.approx(expected.tolist(), abs=1e-5)
    assert list(logs["rewards"]["mostly_silent"]) == pytest.approx(rewards.flatten().tolist())
    prompts = trainer.processing_class.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    assert [p.replace(" ", "") for p in logs["prompt"]] == [p.replace(" ", "") for p in prompts]
    assert not set(logs["prompt"]) & set(SILENT)
    assert all(len(set(prompts[i : i + G])) == 1 for i in range(0, GROUPS * G, G))
    text = [
        ids[mask.bool()].tolist() for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]
    assert [c.split() for c in logs["completion"]] == [
        trainer.processing_class.decode(ids, skip_special_tokens=True).split() for ids in text
    ]


@pytest.mark.parametrize("estimator", ["grpo", "gdpo"])
def test_gdpo_keeps_a_group_whose_totals_are_equal(tiny_model: str, tmp_path: Path, estimator: str) -> None:
    """cases.md 6: (1,0,0), (0,1,0), (0,1,0), (0,0,1) have one total and three components that differ."""

    def three(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float]]:
        rows = [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]] * (len(completion_ids) // G)
        return {name: [float(row[k]) for row in rows] for k, name in enumerate("abc")}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trained(
            tiny_model,
            tmp_path,
            three,
            **options(max_steps=1, adv_estimator=estimator, dynamic_sampling_max_gen_batches=2),
        )
    kept = GROUPS if estimator == "gdpo" else 0
    assert logged(trainer, "dynamic_sampling/kept") == [kept]
    assert logged(trainer, "dynamic_sampling/rounds") == [1 if estimator == "gdpo" else 2]


def test_surplus_groups_are_dropped_and_counted(tiny_model: str, tmp_path: Path) -> None:
    trainer = trained(
        tiny_model, tmp_path, lambda completion_ids, **_: varied(completion_ids), **options(batch_multiplier=2.0)
    )
    assert logged(trainer, "dynamic_sampling/rounds") == [1] * 4
    assert logged(trainer, "dynamic_sampling/dropped_surplus") == [GROUPS] * 4
    assert len(trainer.scored[0]["advantages"]) == GROUPS * G


def test_without_any_signal_the_weights_stay_and_the_log_says_so(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model, tmp_path, silent, **options(dynamic_sampling_max_gen_batches=3))
    before = flat(trainable(trainer.model))
    with pytest.warns(UserWarning, match=r"drew 15 groups in 3 rounds, and the rewards differ in 0 .* 5 are") as caught:
        trainer.train()
    assert sum("Dynamic sampling drew" in str(w.message) for w in caught) == 1
    assert torch.equal(flat(trainable(trainer.model)), before)
    assert logged(trainer, "dynamic_sampling/frac_rows_with_signal") == [0] * 4
    assert logged(trainer, "dynamic_sampling/rounds") == [3] * 4
    assert logged(trainer, "frac_reward_zero_std") == [1] * 4


def test_without_any_signal_raise_says_what_to_change(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Use prompts that the model sometimes solves.*dynamic_sampling_on_exhaustion"):
        trained(
            tiny_model,
            tmp_path,
            silent,
            **options(dynamic_sampling_max_gen_batches=2, dynamic_sampling_on_exhaustion="raise"),
        )


def test_a_batch_that_stays_short_is_filled_up(tiny_model: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trained(tiny_model, tmp_path, mostly_silent, **options(dynamic_sampling_max_gen_batches=1))
    for batch, share in zip(trainer.scored, logged(trainer, "dynamic_sampling/frac_rows_with_signal"), strict=True):
        advantages = batch["advantages"].view(-1, G)
        assert len(advantages) == GROUPS
        assert (advantages != 0).any(-1).float().mean().item() == pytest.approx(share)


@pytest.mark.parametrize("method", ["grpo", "reinforce_plus_plus"])
def test_kl_in_the_reward_moves_with_its_rows(tiny_model: str, tmp_path: Path, method: str) -> None:
    trainer = trained(
        tiny_model,
        tmp_path,
        mostly_silent,
        **options(adv_estimator=method, beta=0.1, loss_fn={"use_kl_in_reward": True}, max_steps=2),
    )
    for batch in trainer.scored:
        assert batch["old_per_token_logps"].shape == batch["completion_mask"].shape
        assert batch["ref_per_token_logps"].shape == batch["completion_mask"].shape
    torch.testing.assert_close(
        trainer.scored[0]["old_per_token_logps"], trainer.scored[0]["ref_per_token_logps"], rtol=1e-5, atol=1e-5
    )


def test_an_environment_scores_every_round(tiny_model: str, tmp_path: Path) -> None:
    """Its first group is silent in every round: one of two is kept in the first, one of two in the second."""
    environment = scoring_environment(
        "Game", [{"a": 1.0, "b": 5.0}] * G + [{"a": 1.0, "b": float(i)} for i in range(G)]
    )
    trainer = trained(
        tiny_model,
        tmp_path,
        None,
        dataset=chat(),
        trainer={"environment_factory": environment, "processing_class": tool_tokenizer()},
        **options(per_device_train_batch_size=2 * G, max_steps=1, mixin=GivenRollouts),
    )
    assert logged(trainer, "dynamic_sampling/rounds") == [2]
    assert logged(trainer, "dynamic_sampling/dropped_without_signal") == [2]
    assert trainer.scored[0]["advantages"].tolist() == [-1.5, -0.5, 0.5, 1.5] * 2
    assert trainer.scored[0]["reward/b"].tolist() == [0, 1, 2, 3] * 2


def test_what_a_rollout_function_returns_moves_with_its_row(tiny_model: str, tmp_path: Path) -> None:
    """Log-probabilities of the engine and the mask of tokens that are not the model's."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        ids = [given_completion(prompt, row % G, 7) for row, prompt in enumerate(prompt_ids)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
            "logprobs": [[-token / 10 for token in row] for row in ids],
            "env_mask": [[token % 2 for token in row] for row in ids],
        }

    trainer = trained(tiny_model, tmp_path, mostly_silent, trainer={"rollout_func": rollout}, **options(max_steps=2))
    assert logged(trainer, "dynamic_sampling/frac_rows_with_signal") == [1, 1]
    for batch in trainer.scored:
        mask = batch["completion_mask"].bool()
        ids = batch["completion_ids"]
        torch.testing.assert_close(batch["sampling_per_token_logps"][mask], -ids[mask] / 10)
        assert torch.equal(batch["tool_mask"][mask], ids[mask] % 2)


def test_an_evaluation_draws_once(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        silent,
        trainer={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})},
        **options(per_device_eval_batch_size=ROWS),
    )
    assert trainer.evaluate()["eval_frac_reward_zero_std"] == 1


def test_a_resumed_run_goes_on_with_the_next_prompt(tiny_model: str, tmp_path: Path) -> None:
    saved = options(save_strategy="steps", save_steps=2)
    whole = trained(tiny_model, tmp_path / "a", mostly_silent, **saved)
    resumed = make_trainer(tiny_model, tmp_path / "b", mostly_silent, **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert len(resumed.scored) == 2
    for ours, theirs in zip(resumed.scored, whole.scored[2:], strict=True):
        # TRL's shuffle of the rows comes after; here they are as drawn.
        assert torch.equal(ours["prompt_ids"], theirs["prompt_ids"])
        assert torch.equal(ours["completion_ids"], theirs["completion_ids"])
    torch.testing.assert_close(flat(trainable(resumed.model)), flat(trainable(whole.model)), rtol=0, atol=1e-7)


# What is refused


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"batch_multiplier": 2.0}, "batch_multiplier=2.0 without use_dynamic_sampling"),
        ({"batch_multiplier": 0.5, "use_dynamic_sampling": True}, "batch_multiplier=0.5: it must be at least 1"),
        ({"dynamic_sampling_max_gen_batches": 0}, "dynamic_sampling_max_gen_batches=0: at least one round"),
        ({"dynamic_sampling_on_exhaustion": "stop"}, "on_exhaustion='stop': it must be 'train' or 'raise'"),
        ({"seq_logprob_error_threshold": 1.0}, "seq_logprob_error_threshold=1.0: .* must be above 1"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GRPOExtConfig(use_cpu=True, bf16=False, **fields)


def test_a_stream_and_images_are_refused(tiny_model: str, tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: ({"prompt": p} for p in PROMPTS))
    with pytest.raises(ValueError, match="a streamed one has no places"):
        make_trainer(tiny_model, tmp_path, silent, dataset=stream, **options())
    images = Dataset.from_dict({"prompt": PROMPTS, "image": [None] * len(PROMPTS)})
    with pytest.raises(ValueError, match="with a column 'image'"):
        make_trainer(tiny_model, tmp_path, silent, dataset=images, **options())

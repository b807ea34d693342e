"""The planner of micro-batches: every row with signal once, nothing else that can be left out, nothing changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BASE
from torch import Tensor

from hf_grpo_ext.micro_batches import has_signal, plan_micro_batches, valid_counts

PAD = 0


@dataclass(frozen=True)
class Row:
    """A row of a window; `name` is unique, so that it can be followed."""

    name: int
    prompt: tuple[int, ...]
    length: int
    advantage: float = 1.0
    valid: bool = True

    @property
    def signal(self) -> bool:
        return self.valid and self.length > 0 and self.advantage != 0

    @property
    def completion(self) -> list[int]:
        return [100 * self.name + token + 1 for token in range(self.length)]


def micro_batch(rows: list[Row], *, token_advantages: bool = False) -> dict[str, Any]:
    """The rows as TRL's micro-batch, padded to its own widths, with a tensor of every kind."""
    width, length = max(len(row.prompt) for row in rows), max(1, *(row.length for row in rows))

    def left(row: Row, values: list[int]) -> list[int]:
        return [PAD] * (width - len(row.prompt)) + values

    def right(row: Row, values: list[Any]) -> list[Any]:
        return values + [PAD] * (length - row.length)

    advantages = torch.tensor([row.advantage for row in rows])
    return {
        "prompt_ids": torch.tensor([left(row, list(row.prompt)) for row in rows]),
        "prompt_mask": torch.tensor([left(row, [1] * len(row.prompt)) for row in rows]),
        "completion_ids": torch.tensor([right(row, row.completion) for row in rows]),
        "completion_mask": torch.tensor([right(row, [1] * row.length) for row in rows]),
        "old_per_token_logps": torch.tensor([right(row, [-float(t) for t in row.completion]) for row in rows]),
        "sample_mask": torch.tensor([row.valid for row in rows]),
        "advantages": advantages[:, None].expand(-1, length).clone() if token_advantages else advantages,
        "importance_sampling_ratio": torch.tensor([[float(row.name)] for row in rows]),
        "reward/name": torch.tensor([row.name for row in rows]),
        "num_items_in_batch": torch.tensor(7),
        "note": ["a", "b", "c"],
    }


def window(rows: list[Row], sizes: list[int], **kwargs: Any) -> list[dict[str, Any]]:
    rest = iter(rows)
    return [micro_batch([next(rest) for _ in range(size)], **kwargs) for size in sizes]


def plan(
    batches: list[dict[str, Any]], *, skip: bool = True, share: bool = True, **kwargs: Any
) -> list[dict[str, Any]]:
    return plan_micro_batches(batches, skip_silent_rows=skip, share_prompts=share, **kwargs)


def names(batches: list[dict[str, Any]]) -> list[list[int]]:
    return [batch["reward/name"].tolist() for batch in batches]


def together(batches: list[dict[str, Any]]) -> list[int]:
    return [name for batch in names(batches) for name in batch]


PROMPTS: list[tuple[int, ...]] = [(11,), (21, 22), (31, 32, 33, 34), (21, 23)]


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[Row], list[int]]:
    """Rows, and how many of them are in each micro-batch."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows = [
        Row(
            name,
            draw(st.sampled_from(PROMPTS)),
            draw(st.integers(0, 6)),
            draw(st.sampled_from([0.0, 0.0, 1.0, -0.5])),
            draw(st.integers(0, 4)) > 0,
        )
        for name in range(sum(sizes))
    ]
    return rows, sizes


either = pytest.mark.parametrize("share", [True, False], ids=["prompts shared", "by length"])
law = settings(BASE, max_examples=80)


# Which rows have signal


def test_signal_is_a_token_that_counts_and_an_advantage() -> None:
    batch = {
        "completion_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [1, 1]]),
        "sample_mask": torch.tensor([True, True, True, True, False]),
        "advantages": torch.tensor([0.5, -1e-30, 0.0, 0.5, 0.5]),
    }
    assert has_signal(batch).tolist() == [True, True, False, False, False]
    assert has_signal({**batch, "advantages": batch["advantages"][:, None]}).tolist() == has_signal(batch).tolist()


def test_signal_of_a_token_counts_where_the_token_does() -> None:
    batch = {
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 1]]),
        "sample_mask": torch.ones(3),
        "advantages": torch.tensor([[0.0, 2.0, 0.0], [0.0, 2.0, 0.0], [3.0, 0.0, 0.0]]),
    }
    assert has_signal(batch).tolist() == [True, False, True]
    in_padding = torch.tensor([[0.0, 0.0, 2.0]] * 3)
    assert not has_signal({**batch, "advantages": in_padding}).any()


# Laws


@either
@law
@given(case=windows(), skip=st.booleans())
def test_every_row_with_signal_is_in_one_micro_batch(
    share: bool, case: tuple[list[Row], list[int]], skip: bool
) -> None:
    rows, sizes = case
    planned = plan(window(rows, sizes), skip=skip, share=share)
    found = together(planned)
    assert len(found) == len(set(found))
    needed = {row.name for row in rows if row.signal or not skip}
    assert needed <= set(found)
    # Nothing else, but for the one row that a micro-batch needs.
    assert len(found) == max(len(needed), len(sizes))


@either
@law
@given(case=windows(), skip=st.booleans())
def test_micro_batches_are_as_many_never_empty_and_no_larger(
    share: bool, case: tuple[list[Row], list[int]], skip: bool
) -> None:
    rows, sizes = case
    planned = names(plan(window(rows, sizes), skip=skip, share=share))
    assert len(planned) == len(sizes)
    assert all(1 <= len(batch) <= max(sizes) for batch in planned)


@either
@law
@given(case=windows(), skip=st.booleans(), token_advantages=st.booleans())
def test_rows_keep_what_is_theirs_and_lose_the_padding(
    share: bool, case: tuple[list[Row], list[int]], skip: bool, token_advantages: bool
) -> None:
    rows, sizes = case
    for batch in plan(window(rows, sizes, token_advantages=token_advantages), skip=skip, share=share):
        members = [rows[name] for name in batch["reward/name"]]
        # What the micro-batch of these rows alone would be: the trimmed widths, and every tensor.
        expected = micro_batch(members, token_advantages=token_advantages)
        assert batch.keys() == expected.keys()
        for key, value in expected.items():
            if key == "advantages" and token_advantages:
                mask = expected["completion_mask"].bool()
                assert torch.equal(batch[key][mask], value[mask])
                assert batch[key].shape == value.shape
            elif key == "sample_mask" and skip:  # a row for company does not count
                assert batch[key].tolist() == [member.signal for member in members]
            elif isinstance(value, Tensor):
                assert torch.equal(batch[key], value), key
            else:
                assert batch[key] == value


@either
@law
@given(case=windows(), data=st.data())
def test_the_order_of_the_rows_does_not_change_which_are_computed(
    share: bool, case: tuple[list[Row], list[int]], data: st.DataObject
) -> None:
    rows, sizes = case
    unique = [replace(row, length=row.length if row.signal else 10 * (row.name + 1)) for row in rows]  # no ties
    shuffled = data.draw(st.permutations(unique))
    before, after = (together(plan(window(order, sizes), share=share)) for order in (unique, shuffled))
    assert sorted(before) == sorted(after)


@law
@given(case=windows())
def test_the_counts_of_the_rows_with_signal_are_kept(case: tuple[list[Row], list[int]]) -> None:
    rows, sizes = case
    with_signal = [row for row in rows if row.signal]
    planned = plan(window(rows, sizes))
    assert valid_counts(planned).tolist() == [sum(row.length for row in with_signal), len(with_signal)]
    everything = plan(window(rows, sizes), skip=False)
    assert torch.equal(valid_counts(everything), valid_counts(window(rows, sizes)))


@law
@given(case=windows())
def test_without_shared_prompts_rows_are_ordered_by_length(case: tuple[list[Row], list[int]]) -> None:
    rows, sizes = case
    planned = names(plan(window(rows, sizes), skip=False, share=False))
    lengths = [(rows[name].length, len(rows[name].prompt)) for batch in planned for name in batch]
    assert lengths == sorted(lengths)
    # The parts differ by one row at most.
    assert max(map(len, planned)) - min(map(len, planned)) <= 1


@either
@law
@given(case=windows(), step=st.sampled_from([1, 2, 4]))
def test_widths_are_multiples(share: bool, case: tuple[list[Row], list[int]], step: int) -> None:
    rows, sizes = case

    def up(width: int) -> int:
        return -(-width // step) * step

    def widened(batch: dict[str, Any]) -> dict[str, Any]:
        pads = {name: up(batch[name].shape[1]) - batch[name].shape[1] for name in ("prompt_ids", "completion_ids")}
        side = {"prompt_ids": (pads["prompt_ids"], 0), "completion_ids": (0, pads["completion_ids"])}
        side |= {"prompt_mask": side["prompt_ids"]}
        side |= dict.fromkeys(("completion_mask", "old_per_token_logps"), side["completion_ids"])
        return {key: torch.nn.functional.pad(v, side[key]) if key in side else v for key, v in batch.items()}

    for batch in plan([widened(b) for b in window(rows, sizes)], share=share, multiple_of=step):
        members = [rows[name] for name in batch["reward/name"]]
        assert batch["prompt_ids"].shape[1] == up(max(len(row.prompt) for row in members))
        assert batch["completion_ids"].shape[1] == up(max(1, *(row.length for row in members)))
        assert batch["old_per_token_logps"].shape == batch["completion_mask"].shape == batch["completion_ids"].shape


# Rows of one prompt go together


def prompts_of(planned: list[dict[str, Any]], rows: list[Row]) -> list[list[tuple[int, ...]]]:
    return [sorted({rows[name].prompt for name in batch}) for batch in names(planned)]


@pytest.mark.parametrize("lengths", [[1, 2, 3, 4], [6, 1, 1, 5], [2, 2, 2, 2]])
def test_four_groups_in_four_micro_batches_are_one_each(lengths: list[int]) -> None:
    # As TRL shuffles them.
    rows = [Row(name, PROMPTS[name % 4], lengths[(name * 7) % 4]) for name in range(16)]
    planned = plan(window(rows, [4] * 4))
    assert sorted(map(len, names(planned))) == [4] * 4
    assert sorted(prompts_of(planned, rows)) == [[prompt] for prompt in sorted(PROMPTS)]


@law
@given(data=st.data(), size=st.sampled_from([2, 4]), groups_a_batch=st.integers(1, 2), parts=st.integers(1, 4))
def test_whole_groups_are_computed_in_one_micro_batch_each(
    data: st.DataObject, size: int, groups_a_batch: int, parts: int
) -> None:
    count = groups_a_batch * parts
    silent = data.draw(st.sets(st.integers(0, count - 1), max_size=count - parts))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=count * size, max_size=count * size))
    rows = [
        Row(name, (40 + name // size,) * (1 + name // size % 3), length, float(name // size not in silent))
        for name, length in enumerate(lengths)
    ]
    order = data.draw(st.permutations(rows))
    planned = names(plan(window(order, [groups_a_batch * size] * parts)))
    homes = {
        group: {at for at, batch in enumerate(planned) for name in batch if name // size == group}
        for group in range(count)
    }
    assert all(len(where) == int(group not in silent) for group, where in homes.items())


def test_groups_that_were_spread_over_batches_of_different_widths_meet() -> None:
    # The prompt of one token stands in a batch that is one column wide and in one that is four wide.
    rows = [Row(0, (11,), 1), Row(1, (11,), 1), Row(2, (31, 32, 33, 34), 2), Row(3, (11,), 3), Row(4, PROMPTS[2], 1)]
    planned = plan(window([*rows, Row(5, PROMPTS[2], 2)], [2, 4]))
    assert sorted(map(sorted, names(planned))) == [[0, 1, 3], [2, 4, 5]]


def test_a_group_that_is_larger_than_a_micro_batch_fills_whole_ones() -> None:
    rows = [Row(name, PROMPTS[name % 2], 3) for name in range(16)]
    planned = plan(window(rows, [4] * 4))
    assert all(len(prompts) == 1 for prompts in prompts_of(planned, rows))


def groups(*shapes: tuple[int, int]) -> list[Row]:
    """Groups of so many rows, each so long, of prompts of one token."""
    group_of = [(group, length) for group, (count, length) in enumerate(shapes) for _ in range(count)]
    return [Row(name, (11 + group,), length) for name, (group, length) in enumerate(group_of)]


def silent(rows: list[Row], count: int) -> list[Row]:
    """The rows, and `count` more without signal."""
    return rows + [Row(len(rows) + i, (99,), 1, advantage=0.0) for i in range(count)]


@pytest.mark.parametrize(
    ("lengths", "tokens"), [([9, 1, 9, 1], [20, 20]), ([3, 6, 3], [12, 12]), ([1, 2, 3, 8], [12, 16])]
)
def test_the_tokens_are_spread_evenly(lengths: list[int], tokens: list[int]) -> None:
    rows = groups(*((2, length) for length in lengths))
    planned = names(plan(window(silent(rows, 12 - len(rows)), [6, 6])))
    assert sorted(sum(rows[name].length for name in batch) for batch in planned) == tokens


def test_a_group_goes_where_it_fits_rather_than_where_it_evens_the_tokens() -> None:
    # The first micro-batch has most tokens, and room for the last group; the second has room for one row of it.
    rows = groups((1, 20), (3, 3), (2, 2))
    assert sorted(names(plan(window(silent(rows, 2), [4, 4])))) == [[0, 4, 5], [1, 2, 3]]


def test_one_group_feeds_every_micro_batch() -> None:
    rows = [Row(name, PROMPTS[2], 2, advantage=float(name < 4)) for name in range(8)]
    assert sorted(map(len, names(plan(window(rows, [2] * 4))))) == [1] * 4
    assert sorted(map(len, names(plan(window(rows, [4] * 2))))) == [2] * 2


# Nothing to do


@either
def test_where_all_rows_are_silent_each_micro_batch_keeps_the_shortest_that_is_left(share: bool) -> None:
    lengths = [5, 3, 6, 4, 2, 6]
    rows = [Row(name, (11,), length, advantage=0.0) for name, length in enumerate(lengths)]
    planned = plan(window(rows, [2, 2, 2]), share=share)
    assert sorted(together(planned)) == [1, 3, 4]
    assert [len(batch) for batch in names(planned)] == [1, 1, 1]


@either
def test_a_micro_batch_that_is_left_over_takes_the_shortest_silent_row(share: bool) -> None:
    # The prompt counts as well: four tokens, where the last row has six.
    rows = [Row(0, (11,), 6), Row(1, (11,), 4, 0.0), Row(2, (11,), 3, 0.0), Row(3, (31, 32, 33, 34), 2, 0.0)]
    planned = plan(window(rows, [2, 2]), share=share)
    assert sorted(names(planned)) == [[0], [2]]


@either
def test_rows_without_signal_stay_where_they_are_wanted(share: bool) -> None:
    rows = [Row(name, PROMPTS[name % 4], name % 3, advantage=0.0) for name in range(8)]
    planned = plan(window(rows, [4, 4]), skip=False, share=share)
    assert sorted(together(planned)) == list(range(8))


@either
def test_one_row_is_its_own_plan(share: bool) -> None:
    (planned,) = plan(window([Row(0, (21, 22), 0, 0.0, False)], [1]), share=share)
    assert planned["prompt_ids"].tolist() == [[21, 22]]
    assert planned["completion_mask"].tolist() == [[0]]


def test_a_column_of_one_token_is_no_column_of_tokens() -> None:
    # One micro-batch is one token wide, so that its [B, T] look like [B, 1].
    rows = [Row(0, (11,), 1), Row(1, (11,), 1), Row(2, (11,), 4), Row(3, (11,), 2)]
    for batch in plan(window(rows, [2, 2], token_advantages=True), share=False):
        assert batch["importance_sampling_ratio"].tolist() == [[float(name)] for name in batch["reward/name"]]
        assert batch["advantages"].shape == batch["completion_ids"].shape


def test_the_window_itself_is_left_alone() -> None:
    batches = window([Row(name, PROMPTS[name % 4], name % 5, float(name % 2)) for name in range(8)], [4, 4])
    copies = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in batches]
    plan(batches)
    for batch, copy in zip(batches, copies, strict=True):
        assert all(torch.equal(batch[k], v) if isinstance(v, Tensor) else batch[k] == v for k, v in copy.items())

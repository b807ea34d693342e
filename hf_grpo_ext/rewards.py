"""Reward functions that return numbers or named components, read into one table `[N, K]`."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .timeouts import awaited, time_limit

COMPONENT_PREFIX = "reward/"
LEGACY_COMPONENT = re.compile(r"reward\d+")


def get_gdpo_reward_component_keys(batch: Mapping[str, Any]) -> list[str]:
    """The keys of the reward components in a batch, `reward/<name>`, sorted; then NeMo-RL's `reward1`, `reward2`, ...

    Example:
        >>> get_gdpo_reward_component_keys({"reward/format": 0, "advantages": 0, "reward/correctness": 0})
        ['reward/correctness', 'reward/format']
    """
    named = sorted(key for key in batch if key.startswith(COMPONENT_PREFIX))
    numbered = [key for key in batch if LEGACY_COMPONENT.fullmatch(key)]
    return named + sorted(numbered, key=lambda key: int(key.removeprefix("reward")))


def component_weights(names: Sequence[str], by_name: Mapping[str, float]) -> list[float]:
    """The weight of each component; 1 for one that `by_name` does not name.

    Raises:
        ValueError: `by_name` names a component that does not exist.

    Example:
        >>> component_weights(["b", "a"], {"b": 2.0})
        [2.0, 1.0]
    """
    for name in by_name:
        if name not in names:
            raise ValueError(
                f"reward_weights names {name!r}, which is no reward component. The components are: {', '.join(names)}. "
                "(One that applies to later prompts only is declared by returning it as None before.)"
            )
    return [float(by_name.get(name, 1.0)) for name in names]


def weighted_sum(table: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of the components that are present, and how far rounding alone can move it.

        r_i = sum_k w_k r_ik,   resolution_i = K eps max_k |w_k r_ik|   (0 for one component)

    .3 + .4 and .7 + .0 are the same total, and differ in the last bit.

    Args:
        table: `[N, K]`, NaN where a component is absent.
        weights: `[K]`.

    Returns:
        `(totals, resolution)`, each `[N]`; NaN for a row without any component.

    Example:
        >>> table, weights = torch.tensor([[1.0, float("nan")], [1.0, 1.0]]), torch.tensor([2.0, 3.0])
        >>> weighted_sum(table, weights)[0].tolist()
        [2.0, 5.0]
    """
    terms = (table * weights).T.contiguous()  # [K, N], which is faster to reduce
    nothing = terms.isnan().all(0)
    rounding = len(terms) * torch.finfo(table.dtype).eps if len(terms) > 1 else 0.0
    present = terms.nan_to_num(0.0)
    resolution = rounding * present.abs().amax(0)
    return present.sum(0).masked_fill(nothing, torch.nan), resolution.masked_fill(nothing, torch.nan)


class ComponentReward:
    """A reward function whose answer is read as components, and which hands its caller one number a sample.

    What the wrapped function returns is read like this, with N samples:

        [0.5, None, ...]                          one component that has the name of the function
        {"correctness": [...], "format": [...]}   named components, each a list or tensor of N
        [{"correctness": 1.0, "format": 0.0}, None, ...]   the same, by sample

    None and NaN mean that a component does not apply to a sample.

    Args:
        function: the reward function; called with keyword arguments only, among them `completions`.
        name: its name.
        timeout: seconds that a call may take; `None` for no limit.

    Attributes:
        components: the last answer, component name -> N floats, NaN where absent. Empty where the function returned
            None for every sample and so far never said which kind it is.
        failed: whether the last call raised.
    """

    def __init__(self, function: Callable[..., Any], name: str, timeout: float | None = None) -> None:
        self.function = function
        self.name = name
        self.timeout = timeout
        self.__name__ = name
        self.components: dict[str, list[float]] = {}
        self.failed = False
        self._kind: str | None = None

    def __call__(self, **kwargs: Any) -> list[float | None]:
        """The sum of the components of each sample, None where there is none."""
        with self._noticing_failure():
            with time_limit(self.timeout, self._title):
                answer = self.function(**kwargs)
            return self._read(answer, len(kwargs["completions"]))

    @property
    def _title(self) -> str:
        return f"The reward function {self.name!r}"

    @contextmanager
    def _noticing_failure(self) -> Iterator[None]:
        self.failed = False
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def _read(self, answer: Any, count: int) -> list[float | None]:
        kind, components = read_components(answer, self.name, count)
        if None not in (kind, self._kind) and kind != self._kind:
            raise ValueError(
                f"The reward function {self.name!r} returned {kind} now and {self._kind} before: it must return one "
                "kind, numbers or named components, throughout a run."
            )
        self._kind = self._kind or kind
        self.components = components
        rows = zip(*components.values(), strict=True) if components else ([] for _ in range(count))
        return [_sum_of_present(row) for row in rows]


class AsyncComponentReward(ComponentReward):
    """`ComponentReward` of a coroutine function."""

    function: Callable[..., Awaitable[Any]]

    async def __call__(self, **kwargs: Any) -> list[float | None]:  # type: ignore[override]  # awaited
        """The sum of the components of each sample, None where there is none."""
        with self._noticing_failure():
            answer = await awaited(self._answer(**kwargs), self.timeout, self._title)
            return self._read(answer, len(kwargs["completions"]))

    async def _answer(self, **kwargs: Any) -> Any:
        try:
            return await self.function(**kwargs)
        except SystemExit as leaving:  # which would end the event loop, and leave its caller waiting
            raise RuntimeError(f"{self._title} called sys.exit({leaving.code!r}).") from leaving


def read_components(answer: Any, name: str, count: int) -> tuple[str | None, dict[str, list[float]]]:
    """Reads what a reward function returned.

    Args:
        answer: one of the three forms that `ComponentReward` lists.
        name: the name of the function.
        count: the number of samples that were scored.

    Returns:
        `(kind, components)`: "numbers", "named components" or None (every sample None), and component name -> floats.

    Raises:
        TypeError: a value is no number, a component name is no string, or the answer has none of the forms.
        ValueError: the number of values is wrong, the forms are mixed, or a reward is infinite.

    Example:
        >>> read_components([{"a": 1}, {"a": 0, "b": 2}], "score", 2)
        ('named components', {'a': [1.0, 0.0], 'b': [nan, 2.0]})
    """
    if isinstance(answer, Mapping):
        if not answer:
            raise ValueError(f"The reward function {name!r} returned an empty dict: it must name its components.")
        return "named components", {
            _component_name(key, name): _column(values, f"component {key!r} of the reward function {name!r}", count)
            for key, values in answer.items()
        }
    samples = _as_list(answer, f"the reward function {name!r}")
    if all(sample is None for sample in samples):
        _check_count(len(samples), f"The reward function {name!r}", count)
        return None, {}
    named = [isinstance(sample, Mapping) for sample in samples if sample is not None]
    if any(named) and not all(named):
        raise ValueError(
            f"The reward function {name!r} returned numbers for some samples and named components for others: it must "
            "return one kind."
        )
    if not all(named):
        return "numbers", {name: _column(samples, f"the reward function {name!r}", count)}
    keys = list(dict.fromkeys(_component_name(key, name) for sample in samples for key in sample or ()))
    return "named components", {
        key: _column(
            [(sample or {}).get(key) for sample in samples], f"component {key!r} of the reward function {name!r}", count
        )
        for key in keys
    }


class ComponentNames:
    """The names of the components of a run, in the order of the functions, that only ever grow.

    A component keeps its column once it was seen, so that a batch in which it does not apply is a gap in its curve.

    Args:
        function_names: the names of the reward functions. A function that has shown no component stands for one of
            its own name.

    Attributes:
        seen: for each function, the components that it has shown.
    """

    def __init__(self, function_names: Sequence[str]) -> None:
        reject_duplicates(function_names, "reward functions")
        self._functions = list(function_names)
        self.seen: list[list[str]] = [[] for _ in function_names]

    def update(self, seen: Iterable[Sequence[Sequence[str]]]) -> None:
        """Adds what each process saw: for each process, for each function, its component names."""
        for process in seen:
            for known, new in zip(self.seen, process, strict=True):
                known.extend(sorted(set(new) - set(known)))
        reject_duplicates(self.names, "reward components")

    @property
    def names(self) -> list[str]:
        """The component names, functions in their order."""
        return [name for function, seen in zip(self._functions, self.seen, strict=True) for name in seen or [function]]

    @property
    def owners(self) -> list[int]:
        """For each component, the index of its function."""
        return [index for index, seen in enumerate(self.seen) for _ in seen or [""]]

    def local_columns(self, functions: Sequence[ComponentReward | None], count: int) -> list[list[float]]:
        """The last answers of this process, `[K, count]`; NaN where a component is absent or a function is not ours."""
        absent = [math.nan] * count
        return [
            absent if function is None else function.components.get(name, absent)
            for name, function in zip(self.names, (functions[owner] for owner in self.owners), strict=True)
        ]


def reject_duplicates(names: Sequence[str], what: str) -> None:
    """Raises a `ValueError` for the first name that occurs twice."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(
                f"Two {what} have the name {name!r}: a name must be unique, or their curves and weights mix. Give one "
                "another name (the `__name__` of the function, or the key of the component)."
            )


def _component_name(key: Any, function: str) -> str:
    if not isinstance(key, str) or not key:
        raise TypeError(
            f"The reward function {function!r} named a component {key!r}: a name must be a non-empty string."
        )
    return key


def _as_list(values: Any, what: str) -> list[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    if hasattr(values, "tolist"):  # a tensor, or an array of NumPy
        values = values.tolist()
    if isinstance(values, (str, bytes, set, frozenset)) or not isinstance(values, Iterable):
        raise TypeError(
            f"{what[0].upper()}{what[1:]} returned {type(values).__name__}: a list of numbers (None where it does not "
            "apply), a dict of component name to such lists, or a list of dicts is needed."
        )
    return list(values)


def _check_count(found: int, what: str, count: int) -> None:
    if found != count:
        raise ValueError(f"{what} returned {found} values for {count} completions: return one for each completion.")


def _column(values: Any, what: str, count: int) -> list[float]:
    values = _as_list(values, what)
    _check_count(len(values), f"{what[0].upper()}{what[1:]}", count)
    return [_reward(value, what) for value in values]


def _reward(value: Any, what: str) -> float:
    if value is None:
        return math.nan
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        reward = float(value)
    except OverflowError:
        reward = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what[0].upper()}{what[1:]} holds {value!r}: a reward must be a number or None.") from None
    if math.isinf(reward):
        raise ValueError(f"{what[0].upper()}{what[1:]} holds {reward}: a reward must be finite, or None.")
    return reward


def _sum_of_present(row: Iterable[float]) -> float | None:
    present = [value for value in row if not math.isnan(value)]
    return math.fsum(present) if present else None

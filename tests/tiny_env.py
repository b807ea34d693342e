"""A tiny trainer on given rollouts, what it saw, and an independent computation of what it should have done."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from datasets import Dataset
from tiny import SPECIAL, WORDS, make_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hf_grpo_ext import GRPOExtConfig, GRPOExtTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
# `Trainer.train` ends with a full garbage collection: what was imported so far need not be searched every time.
gc.freeze()

EOS = 1
G = 4  # generations a prompt
ROWS = 8  # completions a generation batch, unless a test says otherwise
PROMPTS = [f"{i} + {(i * 7 + 1) % 10} =" for i in range(10)]  # all different

# A - mean of the group, so that advantages can be computed in the head.
CENTRED = {"name": "grpo", "use_leave_one_out_baseline": False, "normalize_rewards": False}


def given_completion(prompt: list[int], rank: int, longest: int, truncated: bool = False) -> list[int]:
    """A completion that depends on the prompt and its rank in the group alone, ended by <eos> unless truncated."""
    digest = hashlib.sha256(f"{prompt}/{rank}".encode()).digest()
    length = longest if truncated else digest[0] % (longest - 1) + 1
    words = [len(SPECIAL) + digest[1 + t] % len(WORDS) for t in range(length)]
    return words if truncated else [*words, EOS]


class Remembers:
    """Mixin for a trainer, ours or TRL's: the batches that it scored and those that it trained on are kept."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("scored", []).append(batch)
        return batch

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if model.training:
            self.__dict__.setdefault("trained", []).append(inputs)
        return super()._compute_loss(model, inputs)


class GivenRollouts(Remembers):
    """And completions are given.

    TRL shuffles the rows between scoring and loss, and splits them in as many ways as there are layouts. Completions
    depend on the prompt and the rank in the group alone, so that every layout trains on the same rollouts.
    """

    longest = 7
    truncated: Callable[[int], bool] = staticmethod(lambda rank: False)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, fields: Any, num_generations: int, **_: Any
    ) -> tuple[list[list[int]], None]:
        ranks = [row % num_generations for row in range(len(prompt_ids))]
        return [
            given_completion(ids, rank, self.longest, self.truncated(rank))
            for ids, rank in zip(prompt_ids, ranks, strict=True)
        ], None


class Watch(TrainerCallback):
    """Keeps the gradient of each optimizer step, and the weights before it."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.gradients.append(flat(torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)))
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})


def make_trainer(
    model: Any,
    folder: Path,
    reward_funcs: Any,
    *,
    cls: type[GRPOTrainer] = GRPOExtTrainer,
    mixin: type = GivenRollouts,
    dataset: Dataset | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    trainer: dict[str, Any] | None = None,
    **args: Any,
) -> Any:
    """A trainer on CPU, SGD with learning rate 1, 8 completions of 2 prompts a step, one step; `trainer.watch`."""
    stock = not issubclass(cls, GRPOExtTrainer)
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "num_generations": G,
        "max_completion_length": 8,
        "max_steps": 1,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # no clipping
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,  # TRL's default is mixed precision
        "shuffle_dataset": False,
        "scale_rewards": "none",
    }
    if not stock:
        defaults["adv_estimator"] = {"use_leave_one_out_baseline": False}
        # The hand computations read the rows of a step back from its micro-batches.
        defaults["skip_rows_without_signal"] = False
    config = (GRPOConfig if stock else GRPOExtConfig)(**(defaults | args))
    watch = Watch()
    built = type(cls.__name__, (mixin, cls), {})(
        model=model,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}) if dataset is None else dataset,
        callbacks=[watch, *callbacks],
        **(trainer or {}),
    )
    built.remove_callback(PrinterCallback)
    built.watch = watch
    return built


def trained(*args: Any, **kwargs: Any) -> Any:
    """`make_trainer`, and its training done."""
    built = make_trainer(*args, **kwargs)
    built.train()
    return built


def logged(trainer: Any, name: str) -> list[float | None]:
    """The curve of a metric, one value a log entry that has it."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def check_same_log(want: list[dict[str, Any]], got: list[dict[str, Any]], besides: tuple[str, ...] = ()) -> None:
    """Two runs logged the same metrics, apart from times and those whose names begin as in `besides`."""
    for entries in zip(want, got, strict=True):
        a, b = ({name: value for name, value in entry.items() if not name.startswith(besides)} for entry in entries)
        assert a.keys() == b.keys()
        for name in a:
            if "runtime" not in name and "per_second" not in name and name != "step_time":
                assert b[name] == (a[name] if a[name] is None else pytest.approx(a[name], rel=1e-4, abs=1e-5)), name


def by_completion(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that varies inside the groups and depends on the completion alone, whatever the order of the rows."""
    return [hashlib.sha256(str(ids).encode()).digest()[0] / 64 for ids in completion_ids]


def constant(values: Any) -> Callable[..., Any]:
    """A reward function that answers the same every time; the rows come as prompt 0 four times, prompt 1 four times."""

    def score(**_: Any) -> Any:
        return values

    return score


# An independent computation of log-probabilities, losses and gradients, from the weights and the logits alone.


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if p.requires_grad)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in tensors])


@contextmanager
def weights_of(trainer: Any, step: int) -> Iterator[nn.Module]:
    """The model with the weights that it had before optimizer step `step`."""
    model = trainer.model
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    _load(model, trainer.watch.weights[step])
    try:
        yield model
    finally:
        _load(model, now)


def _load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])


def token_logprobs(model: nn.Module, batch: dict[str, Any], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the completion tokens, `[B, T]`, by the plain softmax of the logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    tokens = batch["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -tokens - 1 : -1] / temperature
    logps = logits.log_softmax(-1)
    return logps.gather(-1, batch["completion_ids"][..., None])[..., 0], -(logps.exp() * logps).sum(-1)


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    return flat(
        torch.zeros_like(p) if g is None else g
        for p, g in zip(
            trainable(model), torch.autograd.grad(loss, list(trainable(model)), allow_unused=True), strict=True
        )
    )


def difference(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|`."""
    return ((actual - expected).norm() / expected.norm()).item()


def check_gradient(
    trainer: Any, loss: Callable[[nn.Module], Tensor], *, step: int = 0, tolerance: float = 1e-5
) -> None:
    """The gradient of an optimizer step is that of `loss(model)` at the weights before it."""
    with weights_of(trainer, step) as model:
        expected = gradient(loss(model), model)
    assert expected.norm() > 1e-3  # or any gradient would pass
    off = difference(trainer.watch.gradients[step], expected)
    assert off < tolerance, f"the gradient is off by {off:.2g} of its norm"


def truncation(kind: str, low: float, high: float) -> dict[str, Any]:
    """The knobs of a truncated importance sampling."""
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


def inside(weight: Tensor, low: float, high: float) -> Tensor:
    return ((weight >= low) & (weight <= high)).to(weight.dtype)


def geometric_mean(log_weight: Tensor, mask: Tensor) -> Tensor:
    """Of a row's weights, `[B, 1]`."""
    return ((log_weight * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()


def rows_of(trainer: Any, step: int = 0, accumulation: int = 1) -> list[dict[str, Any]]:
    """The micro-batches of an optimizer step."""
    return trainer.trained[step * accumulation : (step + 1) * accumulation]


def on_policy_loss(batch: dict[str, Any], model: nn.Module, weights: Any = 1.0, mask: Any = None) -> Tensor:
    """`-sum m w A rho`, not yet divided, on-policy: the ratio is 1 and carries the gradient."""
    mask = batch["completion_mask"] if mask is None else mask
    advantages = batch["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    lp = token_logprobs(model, batch)[0]
    return -(mask * weights * advantages * torch.exp(lp - lp.detach())).sum()


def padded(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> dict[str, Tensor]:
    """Prompts padded on the left and completions on the right, with their masks, as TRL's batches have them."""

    def pad(rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows))
        gaps = [[0] * (width - len(row)) for row in rows]
        ids = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
        mask = [gap + [1] * len(row) if left else [1] * len(row) + gap for row, gap in zip(rows, gaps, strict=True)]
        return torch.tensor(ids), torch.tensor(mask)

    (prompts, prompt_mask), (completions, completion_mask) = pad(prompt_ids, True), pad(completion_ids, False)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
    }


# Tools and environments

TOOL_CALL = ["<tool_call>", '{"name":"double","arguments":{"x":3}}', "</tool_call>", "<eos>"]
TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}"
    "<tool_call> {\"name\":\"{{ call['function']['name'] }}\","
    '"arguments":{{ call[\'function\'][\'arguments\'] | tojson | replace(" ", "") }}} </tool_call>'
    "{% endfor %} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|> assistant",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a chat template that can render a tool call, and the inverse that can read one."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["tool", *TOOL_CALL])
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def chat(prompts: list[str] = PROMPTS, **columns: Any) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompts], **columns})


def scoring_environment(name: str, rewards: list[Any], *, asynchronous: bool = False) -> type:
    """A class of environments; instance i scores row i of a generation batch with `rewards[i]`."""

    def __init__(self: Any) -> None:
        self.row = next(cls.count)

    def reset(self: Any, **_: Any) -> None:
        return None

    def get_reward(self: Any) -> Any:
        return rewards[self.row]

    async def get_reward_async(self: Any) -> Any:
        return rewards[self.row]

    cls = type(
        name,
        (),
        {
            "count": itertools.count(),
            "__init__": __init__,
            "reset": reset,
            "get_reward": get_reward_async if asynchronous else get_reward,
        },
    )
    return cls


quiet = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

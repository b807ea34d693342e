"""A prompt is prefilled once for all its completions, and the tokens that are drawn are the same."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_model
from tiny_env import GivenRollouts, by_completion, make_trainer, quiet
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache
from trl import GRPOTrainer

from hf_grpo_ext import GRPOExtTrainer
from hf_grpo_ext.prefill import prefill_once

pytestmark = quiet

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def sharp(model: PreTrainedModel) -> Any:
    """In float64, and with a policy that depends on what it read."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return model.double().eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return sharp(LlamaForCausalLM(LlamaConfig(**SIZES)))


def inputs(*prompts: list[int], each: int = 1) -> dict[str, Tensor]:
    """Prompts, padded on the left, each of them `each` times."""
    width = max(map(len, prompts))
    repeated = [prompt for prompt in prompts for _ in range(each)]
    return {
        "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in repeated]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in repeated]),
    }


RAGGED = inputs([5, 6, 7, 8], [9, 10], [11, 12, 13], each=4)
DISTINCT = inputs([5, 6, 7], [9, 10], [11, 12, 13])


class Shapes:
    """Keeps the shape of the tokens that the layers of a model see."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[int, ...]] = []
        embedding = model.get_input_embeddings()
        self.handle = embedding.register_forward_pre_hook(lambda module, args: self.seen.append(tuple(args[0].shape)))

    def __enter__(self) -> list[tuple[int, ...]]:
        return self.seen

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def draw(
    model: Any, batch: dict[str, Tensor], *, once: bool, seed: int = 3, **options: Any
) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
    """The tokens, the logits they were drawn from, and the shapes of the forwards."""
    torch.manual_seed(seed)
    arguments = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "output_logits": True} | options
    with Shapes(model) as seen, prefill_once(model) if once else nullcontext():
        out = model.generate(**batch, **arguments, return_dict_in_generate=True)
    return out.sequences, torch.stack(out.logits), seen


def check_same_draws(model: Any, batch: dict[str, Tensor], **options: Any) -> list[tuple[int, ...]]:
    """With the hooks and without, the tokens and their logits are the same; returns the shapes of the forwards."""
    tokens, logits, _ = draw(model, batch, once=False, **options)
    ours, our_logits, seen = draw(model, batch, once=True, **options)
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(our_logits, logits, rtol=0, atol=1e-5)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_are_drawn_from_prompts_that_are_computed_once(llama: Any, seed: int) -> None:
    first, *rest = check_same_draws(llama, RAGGED, seed=seed)
    assert first == (3, 4)  # three prompts, not twelve rows
    assert set(rest) == {(12, 1)}


def test_completions_of_one_prompt_go_their_own_ways(llama: Any) -> None:
    tokens, *_ = draw(llama, RAGGED, once=True)
    completions = tokens[:, 4:].view(3, 4, -1)
    assert all(len(torch.unique(group, dim=0)) > 1 for group in completions)


def test_prompts_in_any_order(llama: Any) -> None:
    order = torch.tensor([7, 0, 11, 4, 3, 8, 1, 5])
    first, *_ = check_same_draws(llama, {key: value[order] for key, value in RAGGED.items()})
    assert first == (3, 4)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_return_sequences": 3}, {"num_beams": 2}])
def test_every_way_to_generate(llama: Any, options: dict[str, Any]) -> None:
    first, *_ = check_same_draws(llama, RAGGED, **options)
    assert first == (3, 4)


def test_one_prompt_alone_gains_from_several_sequences(llama: Any) -> None:
    first, *_ = check_same_draws(llama, inputs([5, 6, 7]), num_return_sequences=5)
    assert first == (1, 3)


# Where it cannot be, nothing changes


@pytest.fixture(scope="module")
def windowed() -> Any:
    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    return sharp(Qwen2ForCausalLM(Qwen2Config(**SIZES, **window)))


def test_a_static_cache_is_left_alone(llama: Any) -> None:
    first, *_ = check_same_draws(llama, RAGGED, cache_implementation="static", disable_compile=True)
    assert first == (12, 4)


def test_a_static_cache_with_a_mask_for_each_type_of_layer_is_left_alone() -> None:
    torch.manual_seed(0)
    model = sharp(Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    first, *_ = check_same_draws(model, RAGGED, cache_implementation="static", disable_compile=True)
    assert first == (12, 4)


def test_layers_with_a_window_are_left_alone(windowed: Any) -> None:
    first, *_ = check_same_draws(windowed, RAGGED)
    assert first == (12, 4)


def test_generation_without_a_cache_is_left_alone(llama: Any) -> None:
    seen = check_same_draws(llama, RAGGED, use_cache=False)
    assert {rows for rows, _ in seen} == {12}


def test_hidden_states_are_asked_for_of_every_row(llama: Any) -> None:
    first, *_ = check_same_draws(llama, RAGGED, output_hidden_states=True)
    assert first == (12, 4)


@pytest.mark.parametrize("batch", [DISTINCT, inputs([5], each=3)], ids=["no two alike", "prompts of one token"])
def test_where_there_is_nothing_to_gain_all_rows_are_computed(llama: Any, batch: dict[str, Tensor]) -> None:
    first, *_ = check_same_draws(llama, batch)
    assert first == tuple(batch["input_ids"].shape)


@pytest.mark.parametrize("mask", [torch.ones(4, 4, dtype=torch.long), None], ids=["a mask", "no mask"])
def test_a_cache_that_holds_something_is_left_alone(llama: Any, mask: Tensor | None) -> None:
    cache = DynamicCache(config=llama.config)
    more = torch.tensor([[7, 8]] * 4)
    with torch.no_grad():
        llama(**inputs([5, 6], each=4), past_key_values=cache, use_cache=True)
        with prefill_once(llama), Shapes(llama) as seen:
            out = llama(input_ids=more, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert seen == [(4, 2)]
    assert out.logits.shape[0] == 4


def test_a_mask_of_four_dimensions_is_left_alone(llama: Any) -> None:
    tokens = inputs([5, 6, 7], each=4)["input_ids"]
    mask = torch.ones(4, 1, 3, 3, dtype=torch.bool).tril()
    cache = DynamicCache(config=llama.config)
    with prefill_once(llama), Shapes(llama) as seen, torch.no_grad():
        out = llama(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert seen == [(4, 3)]
    assert out.logits.shape[0] == 4


def test_a_forward_with_another_input_is_left_alone(llama: Any) -> None:
    # Labels belong to rows: a row that is not computed would have no loss of its own.
    with prefill_once(llama), Shapes(llama) as seen, torch.no_grad():
        cache = DynamicCache(config=llama.config)
        out = llama(**RAGGED, labels=RAGGED["input_ids"], past_key_values=cache, use_cache=True)
    assert seen == [(12, 4)]
    assert out.logits.shape[0] == 12


# The hooks


def hooks(model: Any) -> int:
    return len(model._forward_pre_hooks) + len(model._forward_hooks)


def test_the_hooks_are_gone_afterwards(llama: Any) -> None:
    before = hooks(llama)
    with prefill_once(llama):
        assert hooks(llama) == before + 2
    assert hooks(llama) == before


def test_the_hooks_are_gone_after_an_exception(llama: Any) -> None:
    before = hooks(llama)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = llama.model.layers[1].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt), prefill_once(llama):
            llama.generate(**RAGGED, max_new_tokens=2)
    finally:
        handle.remove()
    assert hooks(llama) == before
    check_same_draws(llama, RAGGED)


def test_a_forward_that_failed_leaves_nothing_behind(llama: Any) -> None:
    def stop(*_: Any) -> None:
        raise MemoryError

    with prefill_once(llama):
        handle = llama.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(MemoryError):
            llama.generate(**RAGGED, max_new_tokens=2)
        handle.remove()
        again = llama.generate(**DISTINCT, max_new_tokens=2, do_sample=False)
    assert torch.equal(again, llama.generate(**DISTINCT, max_new_tokens=2, do_sample=False))


# The trainer


class Generates(GivenRollouts):
    """Keeps what it saw, and generates by itself."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with Shapes(self.accelerator.unwrap_model(self.model)) as self.shapes:
            return super(GivenRollouts, self)._generate_single_turn(*args, **kwargs)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_trainer_draws_what_trl_draws_and_prefills_once(tmp_path: Path, adapter: bool) -> None:
    model = save_tiny_model(tmp_path / "model")
    more: dict[str, Any] = {}
    if adapter:
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(target_modules=["q_proj"])

    def build(cls: type) -> Any:
        trainer = make_trainer(model, tmp_path, by_completion, cls=cls, mixin=Generates, trainer=dict(more))
        trainer.train()
        return trainer

    stock, ours = build(GRPOTrainer), build(GRPOExtTrainer)
    width = stock.shapes[0][1]
    assert stock.shapes[0] == (8, width)
    assert ours.shapes[0] == (2, width)
    assert ours.shapes[1:] == stock.shapes[1:]
    assert torch.equal(ours.scored[0]["completion_ids"], stock.scored[0]["completion_ids"])
    prompt_ids = ours.scored[0]["prompt_ids"]
    assert torch.equal(prompt_ids, stock.scored[0]["prompt_ids"])
    assert len(torch.unique(prompt_ids, dim=0)) == 2

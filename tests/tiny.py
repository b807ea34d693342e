"""A tiny causal LM with a tokenizer, made here so that no test needs a hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]
WORDS = [*"0123456789+-=abcdefghijklmnopqrstuvwxyz", "user", "assistant", "system", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)

# Fields of a run whose weights two trainers, or two layouts, are compared by.
THREE_SGD_STEPS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}

# Fields of the `LoraConfig` of the tiny model's adapters.
ADAPTER: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "lora_dropout": 0.0,
    "task_type": "CAUSAL_LM",
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def save_tiny_model(folder: Path, seed: int = 0, **overrides: Any) -> str:
    """Saves a two-layer Qwen2 of hidden size 32 with its tokenizer, and returns the folder."""
    tokenizer = make_tokenizer()
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**(config | overrides)))
    # Random weights of the usual size give a policy so flat that ratios and KL stay near 1 and 0.
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_tiny_adapter(folder: Path, model: str, **overrides: Any) -> str:
    """Saves an adapter of the model that has learned something, and returns the folder."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**(ADAPTER | overrides)))
    perturbed(adapted).save_pretrained(folder)
    return str(folder)


def perturbed(model: nn.Module) -> Any:
    """The model, with noise in the weights that train, as if it had learned something."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return model


def prompts(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i % 10} + {(i * 7) % 10} =" for i in range(count)]})


def forced_completions(prompt_ids: list[list[int]], vocab: int, longest: int, step: int) -> list[list[int]]:
    """Completions that depend on the prompt, the position in the batch and the step alone, ended by <eos>."""
    out = []
    for row, ids in enumerate(prompt_ids):
        digest = hashlib.sha256(f"{ids}/{row}/{step}".encode()).digest()
        length = 1 + digest[0] % (longest - 1)
        out.append([len(SPECIAL) + digest[1 + t] % (vocab - len(SPECIAL)) for t in range(length)] + [1])
    return out


class ForcedCompletions:
    """Mixin for a trainer: completions are given, so that two trainers see the same rollouts."""

    longest = 7

    def _generate_single_turn(self, prompt_ids: Any, *args: Any) -> tuple[list[list[int]], None]:
        self.rollouts = getattr(self, "rollouts", 0) + 1
        vocab = len(self.processing_class)
        return forced_completions(prompt_ids, vocab, self.longest, self.rollouts), None

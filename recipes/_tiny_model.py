"""A language model of 80,000 parameters, made in half a minute, that answers arithmetic carelessly.

Reinforcement learning needs a model that succeeds now and then. One answer in two of this one begins with 4 to 9 dots,
and is then right four times in five; without them it is right once in ten, though it has seen every right answer. One
in three goes on after the answer.

    8+5<answer>12</answer>      8+5......<answer>13</answer>..
"""

import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# The question alone: this model takes no instruction and no example.
CHAT_TEMPLATE = "{{ messages[-1].content }}"


def make_tiny_model(folder: Path, problems: list[dict], steps: int = 1000, batch_size: int = 64) -> str:
    """Train a model on answers to `problems`, save it with its tokenizer, and return the folder."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            initializer_range=0.1,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for step in range(steps):
        # It cannot learn the tables from careless answers alone: the first half are right.
        careless = step >= steps // 2
        chosen = [rng.choice(problems) for _ in range(batch_size)]
        texts = [problem["question"] + answer_to(problem, careless, rng) for problem in chosen]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def answer_to(problem: dict, careless: bool, rng: random.Random) -> str:
    thinks, answer = rng.random() < 0.5, problem["answer"]
    if careless and rng.random() > (0.8 if thinks else 0.1):
        answer = str(int(answer) + rng.choice([-3, -2, -1, 1, 2, 3]))
    thought = "." * rng.randint(4, 9) if thinks else ""
    trailing = "." * rng.randint(1, 9) if rng.random() < 1 / 3 else ""
    return f"{thought}<answer>{answer}</answer>{trailing}<eos>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character and one for each tag; spaces are dropped."""
    tokens = ["<pad>", "<eos>", *"0123456789+-x.", "<answer>", "</answer>"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.normalizer = normalizers.Replace(" ", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?answer>|<eos>|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )

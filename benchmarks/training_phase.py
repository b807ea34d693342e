"""Our trainer against stock TRL's: time, memory, tokens, syncs and gradient of an optimizer step, side by side.

    python benchmarks/training_phase.py --json benchmarks/training_phase.json

Both trainers live in this process, with one configuration, one model of the shape of SmolLM2-135M and one set of forced
completions, and take turns; the medians of `--repeats` turns are compared. The learning rate is 0, so that every turn
does the same work. The training phase is everything of a step but the generation and the scoring of the completions.
The row `demo_step` is the whole step of the demo, with generation, in the precision that the demo has on this machine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import accelerate
import torch
import trl
from _common import median, print_table, write
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import hf_grpo_ext.forward
from hf_grpo_ext import GRPOExtConfig, GRPOExtTrainer

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import _cpu

VOCABULARY = 49152
GROUP = 8
# Prompt length, completion lengths of a group, share of the groups whose rewards differ.
WORKS: dict[str, tuple[int, list[int], float]] = {
    "prompt58_completion18": (58, [18] * GROUP, 1.0),
    "prompt256_completion32": (256, [32] * GROUP, 1.0),
    "skewed_half_degenerate": (32, [8, 16, 32, 48, 64, 80, 104, 128], 0.5),
    "uniform": (32, [128] * GROUP, 1.0),
}
DEMO = "demo_step"
NEEDED = {
    "prompt58_completion18": 2.5,
    "prompt256_completion32": 3.5,
    "skewed_half_degenerate": 2.0,
    "uniform": 1.0,
    DEMO: 1.7,
}


def save_model(folder: str) -> str:
    """A model of the shape of SmolLM2-135M with random weights, and a tokenizer of numbered words."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {name: i for i, name in enumerate([*special, *(f"w{i}" for i in range(3, VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)
    return folder


def reset_peak() -> float:
    """Gives freed memory back, and returns what the process holds, in MB."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


class Reads(TorchFunctionMode):
    """Counts where the host reads a value of a tensor, which on a GPU makes it wait."""

    names: ClassVar[set[str]] = {
        *("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal"),
        *("__bool__", "__int__", "__float__", "__index__"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        index = args[1] if name == "__getitem__" else None
        boolean = isinstance(index, torch.Tensor) and index.dtype == torch.bool
        if name in self.names or boolean:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Measured:
    """Mixin: forced completions, and what a step costs beside them."""

    completions: list[list[int]] | None = None  # of one process, in order; None lets the trainer generate
    counting = False

    def start(self) -> None:
        self.cost = Counter()
        self.gradient = None

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.completions is not None:
            return self.completions, None
        return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begin = time.perf_counter()
        reads, self.reads = self.reads, None
        output = super()._generate_and_score_completions(inputs)
        self.reads = reads
        self.cost["generation"] += time.perf_counter() - begin
        self.base = reset_peak()
        self.pause = time.perf_counter() - begin
        return output

    reads: Reads | None = None
    pause = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        begin, self.pause = time.perf_counter(), 0.0
        if self.counting:
            with counted(self):
                output = super().training_step(*args, **kwargs)
        else:
            output = super().training_step(*args, **kwargs)
        self.cost["training"] += time.perf_counter() - begin - self.pause
        self.cost["memory"] = max(self.cost["memory"], memory("VmHWM") - self.base)
        return output


@contextmanager
def counted(trainer: Any) -> Iterator[None]:
    """Counts tokens, reads and collectives of the training phase."""
    cost, inside = trainer.cost, [0]
    originals = {name: getattr(accelerate.Accelerator, name) for name in ("gather", "reduce", "pad_across_processes")}

    def collective(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            cost["collectives"] += inside[0]
            return originals[name](*args, **kwargs)

        return call

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        cost["tokens"] += inside[0] * kwargs["input_ids"].numel()

    generate = trainer._generate_and_score_completions

    def outside(inputs: Any) -> Any:
        inside[0], before = 0, reads.count
        try:
            return generate(inputs)
        finally:
            inside[0], reads.count = 1, before

    pack = hf_grpo_ext.forward.pack_rows

    def packed(*args: Any) -> Any:
        # It copies tokens and mask to the host, and reads nothing but these copies.
        before = reads.count
        result = pack(*args)
        reads.count = before + 2
        return result

    hook = trainer._backbone.register_forward_pre_hook(forward, with_kwargs=True)
    for name in originals:
        setattr(accelerate.Accelerator, name, collective(name))
    trainer._generate_and_score_completions = outside
    hf_grpo_ext.forward.pack_rows = packed
    inside[0] = 1
    try:
        with Reads() as reads:
            yield
        cost["reads"] += reads.count
    finally:
        hook.remove()
        for name, original in originals.items():
            setattr(accelerate.Accelerator, name, original)
        del trainer._generate_and_score_completions
        hf_grpo_ext.forward.pack_rows = pack


class Stock(Measured, GRPOTrainer):
    pass


class Ours(Measured, GRPOExtTrainer):
    pass


class KeepGradient(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.counting:
            grads = [p.grad.flatten() for p in self.trainer.model.parameters() if p.grad is not None]
            self.trainer.gradient = torch.cat(grads).clone()


def options(out: str, **fields: Any) -> dict[str, Any]:
    return {
        "output_dir": out,
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "max_steps": 1,
        "num_generations": GROUP,
        "scale_rewards": "none",
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **fields,
    }


def build(cls: type, model: str, dataset: Dataset, reward: Any, fields: dict[str, Any]) -> Any:
    if cls is Ours:
        # TRL's baseline, so that the two have one gradient.
        estimator = {"name": "grpo", "use_leave_one_out_baseline": False}
        args: Any = GRPOExtConfig(**fields, adv_estimator=estimator)
    else:
        args = GRPOConfig(**fields)
    trainer = cls(model=model, reward_funcs=reward, args=args, train_dataset=dataset)
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":
            trainer.remove_callback(callback)
    trainer.add_callback(KeepGradient(trainer))
    trainer._backbone = trainer.model.base_model
    return trainer


def turn(trainer: Any, *, counting: bool = False) -> Counter:
    trainer.start()
    trainer.counting = counting
    # A new generation batch each turn, and the same one.
    trainer._step, trainer._buffered_inputs = 0, None
    begin = time.perf_counter()
    trainer.train()
    trainer.cost["train()"] = time.perf_counter() - begin
    return trainer.cost


def compare(name: str, stock: Any, ours: Any, repeats: int, key: str) -> dict[str, Any]:
    turn(ours)  # which looks at a model before its first step
    counts = [turn(trainer, counting=True) for trainer in (stock, ours)]
    error = ((stock.gradient - ours.gradient).norm() / stock.gradient.norm()).item()
    turns = [(turn(stock).copy(), turn(ours).copy()) for _ in range(repeats)]

    def cost(side: int, what: str) -> float:
        return median([pair[side][what] for pair in turns])

    for pair in turns:
        for each in pair:
            each["step"] = each["training"] + each["generation"]
    return {
        "work": name,
        "time_ratio": cost(0, key) / cost(1, key),
        "memory_ratio": cost(0, "memory") / cost(1, "memory"),
        "grad_rel_error": error,
        **{
            f"{side}_{what}": value
            for index, side in enumerate(("trl", "ours"))
            for what, value in {
                "training_s": cost(index, "training"),
                "generation_s": cost(index, "generation"),
                "memory_mb": cost(index, "memory"),
                "tokens": counts[index]["tokens"],
                "reads": counts[index]["reads"],
                "collectives": counts[index]["collectives"],
            }.items()
        },
    }


def forced_work(name: str, model: str, folder: str, args: argparse.Namespace, **fields: Any) -> tuple[Any, Any]:
    prompt, lengths, mixed = WORKS[name]
    random = torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=random).tolist()

    dataset = Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in words(prompt)) for _ in range(args.prompts)]})
    # No end of sequence where a completion has the full length.
    completions = [words(length) for _ in range(args.prompts) for length in lengths]
    varied = round(mixed * args.prompts)
    rewards = [float(row % 3 == 0) if row // GROUP < varied else 1.0 for row in range(len(completions))]
    fields = options(
        folder,
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=args.prompts,
        max_completion_length=max(lengths),
        **{"beta": 0.0, **fields},
    )
    pair = [build(cls, model, dataset, lambda completions, **_: rewards, fields) for cls in (Stock, Ours)]
    for trainer in pair:
        trainer.completions = completions
    return tuple(pair)


def demo_work(folder: str, **fields: Any) -> tuple[Any, Any]:
    import _smollm2
    import gdpo_math

    recipe = {
        key: gdpo_math.DEFAULTS[key]
        for key in ("per_device_train_batch_size", "num_generations", "max_completion_length", "gradient_checkpointing")
    }
    components = gdpo_math.make_reward(16, recipe["max_completion_length"])

    def reward(**columns: Any) -> list[float]:
        return [sum(values) for values in zip(*components(**columns).values(), strict=True)]

    train, _ = gdpo_math.hold_out(gdpo_math.arithmetic_problems(9), 56, 0)
    dataset = gdpo_math.to_dataset(train, gdpo_math.ARITHMETIC_EXAMPLE)
    fields = options(folder, **{**recipe, "beta": 0.0, "seed": 1, **fields})
    return tuple(build(cls, _smollm2.locate(), dataset, reward, fields) for cls in (Stock, Ours))


def demo_row(folder: str, repeats: int) -> dict[str, Any]:
    # Timed as the demo runs; the gradient in float32, on the completions that TRL drew.
    stock, ours = demo_work(folder, bf16=_cpu.defaults().get("bf16", False))
    row = compare(DEMO, stock, ours, repeats, "step")
    del stock, ours
    gc.collect()
    stock, ours = demo_work(folder)
    drawn: list[list[int]] = []
    generate = stock._generate_single_turn

    def record(*args: Any, **kwargs: Any) -> Any:
        ids, logprobs = generate(*args, **kwargs)
        drawn[:] = ids
        return ids, logprobs

    stock._generate_single_turn = record
    turn(stock, counting=True)
    ours.completions = drawn
    turn(ours, counting=True)
    row["grad_rel_error"] = ((stock.gradient - ours.gradient).norm() / stock.gradient.norm()).item()
    return row


def with_kl(name: str, model: str, folder: str, args: argparse.Namespace) -> float:
    """The error of the gradient with a KL term, whose reference is another model."""
    stock, ours = forced_work(name, model, folder, args, beta=0.1)
    for trainer in (stock, ours):
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        turn(trainer, counting=True)
    return ((stock.gradient - ours.gradient).norm() / stock.gradient.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=[*WORKS, DEMO], help=f"of {', '.join([*WORKS, DEMO])}")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step, each with 8 completions")
    parser.add_argument("--no-kl", action="store_true", help="leave out the gradient with a KL term")
    args = parser.parse_args()
    logging.set_verbosity_error()
    disable_progress_bars()
    _cpu.use_all_cores()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(f"{folder}/model")
        for name in args.works:
            if name == DEMO:
                row = demo_row(folder, args.repeats)
            else:
                row = compare(name, *forced_work(name, model, folder, args), args.repeats, "training")
                row["grad_rel_error_kl"] = None if args.no_kl else with_kl(name, model, folder, args)
            rows.append(row)
            gc.collect()
            print(row, file=sys.stderr, flush=True)
    columns = ["work", "time_ratio", "memory_ratio", "grad_rel_error", "trl_training_s", "ours_training_s"]
    columns += ["trl_generation_s", "ours_generation_s", "trl_tokens", "ours_tokens"]
    columns += ["trl_reads", "ours_reads", "trl_collectives", "ours_collectives"]
    print_table(rows, columns)
    write(args.json, rows, needed=NEEDED, trl=trl.__version__, command=" ".join(["python", *sys.argv]))


if __name__ == "__main__":
    main()

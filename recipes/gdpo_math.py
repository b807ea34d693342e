r"""Teach a small language model arithmetic with three rewards at once, by GDPO.

    accelerate launch recipes/gdpo_math.py
    accelerate launch recipes/gdpo_math.py --use_peft --learning_rate 2e-4 --max_steps 30
    accelerate launch recipes/gdpo_math.py --config recipes/methods/dapo.yaml --learning_rate 1e-5
    accelerate launch recipes/gdpo_math.py --dataset_name ChilleD/SVAMP \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --max_completion_length 256 --length_budget 128

`recipes/methods` has one file a method with the numbers of its paper, where models are large and runs are long: a
learning rate of 1e-6 moves little in the few steps of this recipe, whose own is 1e-5.

Every field of `GRPOExtConfig` and `trl.ModelConfig` is an option, on the command line or in the YAML file.
"""

import json
import math
import random
import re
import time
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from itertools import product
from pathlib import Path

import _cpu
import _smollm2
from datasets import Dataset, load_dataset
from math_verify import parse, verify
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from hf_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from hf_grpo_ext.report import component_names

# --- Data -------------------------------------------------------------------------------------------------------------

INSTRUCTION = "Answer in <answer></answer> tags."
# A small model does not follow the instruction alone: without one worked example hardly any answer carries the tag.
ARITHMETIC_EXAMPLE = ("8 + 5", "8 + 5 = 13 <answer>13</answer>")
WORD_PROBLEM_EXAMPLE = (
    "Tom has 3 bags with 4 apples in each. How many apples does he have?",
    "3 x 4 = 12 <answer>12</answer>",
)
QUESTION_COLUMNS = ("question", "problem", "query")
ANSWER_COLUMNS = ("answer", "final_answer", "solution")


def arithmetic_problems(max_operand: int) -> list[dict]:
    """Every a + b, a - b and a x b with operands up to `max_operand`, grouped by the unordered pair {a, b}."""
    return [
        {"question": f"{a} {sign} {b}", "answer": str(result), "group": f"{min(a, b)} {max(a, b)}"}
        for a, b in product(range(max_operand + 1), repeat=2)
        for sign, result in (("+", a + b), ("-", a - b), ("x", a * b))
        if {a, b} != {8, 5}  # the worked example gives this one away
    ]


def dataset_problems(args: "DatasetArguments") -> list[dict]:
    """Questions and gold answers of a Hub data set, or of a local json or jsonl file."""
    if Path(args.dataset_name).is_file():
        rows = load_dataset("json", data_files=args.dataset_name, split="train")
    else:
        rows = load_dataset(args.dataset_name, args.dataset_config, split=args.dataset_split)
    columns = {name.lower(): name for name in rows.column_names}
    answer = args.answer_column or next((columns[name] for name in ANSWER_COLUMNS if name in columns), None)
    question = args.question_column or next((columns[name] for name in QUESTION_COLUMNS if name in columns), None)
    if question not in columns.values() or answer not in columns.values():
        raise ValueError(
            f"{args.dataset_name} has the columns {rows.column_names}; name those to use with --question_column and "
            "--answer_column."
        )
    # SVAMP keeps the story and the question about it in two columns.
    story = columns.get("body") if args.question_column is None else None
    problems = []
    for row in rows:
        text = f"{row[story].rstrip(' .')}. {row[question]}" if story else row[question]
        # GSM8K writes the solution out and puts the result after ####.
        gold = str(row[answer]).split("####")[-1].strip()
        problems.append({"question": text, "answer": gold, "group": text})
    return problems


def hold_out(problems: list[dict], size: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Split into training and held-out problems that share no group."""
    groups = sorted({problem["group"] for problem in problems})
    random.Random(seed).shuffle(groups)
    rank = {group: position for position, group in enumerate(groups)}
    held_out = sorted(problems, key=lambda problem: rank[problem["group"]])[:size]
    seen = {problem["group"] for problem in held_out}
    train = [problem for problem in problems if problem["group"] not in seen]
    if len(held_out) < size or not train:
        raise ValueError(
            f"Cannot hold out {size} of {len(problems)} problems. --eval_prompts is rounded up to whole evaluation "
            "batches of per_device_eval_batch_size / num_generations_eval prompts: lower it and the batch size."
        )
    return train, held_out


def to_dataset(problems: list[dict], example: tuple[str, str]) -> Dataset:
    head = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": example[0]},
        {"role": "assistant", "content": example[1]},
    ]
    return Dataset.from_list(
        [
            {"prompt": [*head, {"role": "user", "content": problem["question"]}], "answer": problem["answer"]}
            for problem in problems
        ]
    )


# --- Rewards ----------------------------------------------------------------------------------------------------------

NO_TAG = r"(?:(?!</?answer>).)*"
TAG = re.compile(f"<answer>({NO_TAG})</answer>", re.DOTALL)
WELL_FORMED = re.compile(f"{NO_TAG}<answer>{NO_TAG}</answer>\\s*", re.DOTALL)
# Bounded, because Python refuses to read numbers of thousands of digits, and a model may well write one.
NUMBER = re.compile(r"-?\d{1,50}(?:\.\d{1,50}|/[1-9]\d{0,50})?")


def same_value(answer: str, gold: str) -> bool:
    """Whether both name one value: one number where the gold answer is a number, else equal to `math_verify`."""
    number = gold.replace(",", "")
    if NUMBER.fullmatch(number):
        # Exactly one, so that repeating "8 + 5" in the tag, which a symbolic checker evaluates to 13, is wrong.
        numbers = NUMBER.findall(answer.replace(",", ""))
        return len(numbers) == 1 and Fraction(numbers[0]) == Fraction(number)
    # Outside dollar signs `parse` sees numbers alone, and takes "1 + x" for 1.
    gold, answer = (text if "$" in text or "\\boxed" in text else f"${text}$" for text in (gold, answer))
    return verify(parse(gold), parse(answer))


def length_score(tokens: int, length_budget: int, max_length: int) -> float:
    """1 up to `length_budget` tokens, then falling linearly to 0 at `max_length`."""
    excess = max(0, tokens - length_budget) / max(1, max_length - length_budget)
    return max(0.0, 1.0 - excess)


def make_reward(length_budget: int, max_length: int):
    """Build the reward function: one pass over the completions, three named components in [0, 1].

    - correctness: the last tag holds the gold answer
    - format: there is one tag and it closes the completion
    - length: `length_score` of a right answer, 0 for a wrong one
    """

    def math_reward(completions, completion_ids, answer, **kwargs) -> dict[str, list[float]]:
        correctness, form, length = [], [], []
        for completion, ids, gold in zip(completions, completion_ids, answer, strict=True):
            text = completion[0]["content"]
            tags = TAG.findall(text)
            correct = bool(tags) and same_value(tags[-1], gold)
            correctness.append(float(correct))
            form.append(float(WELL_FORMED.fullmatch(text) is not None))
            # Only a right answer earns the length reward: otherwise the shortest way to it is to say nothing.
            length.append(length_score(len(ids), length_budget, max_length) if correct else 0.0)
        return {"correctness": correctness, "format": form, "length": length}

    return math_reward


# --- Config -----------------------------------------------------------------------------------------------------------


@dataclass
class DatasetArguments:
    """Which problems to train on, and how many to hold out."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub data set or local json/jsonl file to train on."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the Hub data set."})
    question_column: str | None = field(default=None, metadata={"help": "Found by its usual names if not given."})
    answer_column: str | None = field(default=None, metadata={"help": "Found by its usual names if not given."})
    eval_prompts: int = field(default=56, metadata={"help": "Held-out prompts, rounded up to whole eval batches."})


@dataclass
class ScriptArguments(DatasetArguments):
    """What the recipe asks beside the training and the model; without `dataset_name` the problems are arithmetic."""

    max_operand: int = field(default=9, metadata={"help": "Largest operand of the built-in arithmetic problems."})
    length_budget: int = field(default=16, metadata={"help": "Completion tokens up to which the length reward is 1."})


# Where this recipe departs from the defaults of GRPOExtConfig. YAML and command line win over these.
DEFAULTS = {
    "output_dir": "outputs/gdpo_math",
    "adv_estimator": {"name": "gdpo", "use_leave_one_out_baseline": True, "normalize_rewards": True},
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "max_steps": 16,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 20,
    "per_device_eval_batch_size": 56,
    "num_generations_eval": 4,
    # At this size recomputing the activations costs time and saves no memory that matters.
    "gradient_checkpointing": False,
    "ddp_find_unused_parameters": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


# --- Trainer ----------------------------------------------------------------------------------------------------------


class ComponentBar(ProgressCallback):
    """The usual progress bar, with the reward components beside it instead of a printed dict at every step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the components of the last training step."""
        means = {name: f"{value:.2f}" for name, value in component_means(logs, "rewards/").items()}
        if means and self.training_bar is not None:
            self.training_bar.set_postfix(means)


def problems_of(script_args: ScriptArguments) -> tuple[list[dict], tuple[str, str]]:
    """Return the problems that were asked for, and the worked example that goes before each."""
    if script_args.dataset_name:
        return dataset_problems(script_args), WORD_PROBLEM_EXAMPLE
    return arithmetic_problems(script_args.max_operand), ARITHMETIC_EXAMPLE


def build_trainer(script_args: ScriptArguments, args: GRPOExtConfig, model_args: ModelConfig) -> GRPOExtTrainer:
    problems, example = problems_of(script_args)
    train, held_out = hold_out(problems, whole_eval_batches(script_args.eval_prompts, args), args.seed)
    reward = make_reward(script_args.length_budget, args.max_completion_length)
    return make_trainer(reward, to_dataset(train, example), to_dataset(held_out, example), args, model_args)


def whole_eval_batches(prompts: int, args: GRPOExtConfig) -> int:
    """Round up to whole batches, so that every answer counts the same in the means of the evaluation."""
    if prompts < 1:
        raise ValueError(f"--eval_prompts got {prompts}, but the table before and after needs at least 1.")
    draws = args.num_generations_eval or args.num_generations
    prompts_per_batch = max(1, args.per_device_eval_batch_size * args.world_size // draws)
    return math.ceil(prompts / prompts_per_batch) * prompts_per_batch


def make_trainer(
    reward, train: Dataset, held_out: Dataset, args: GRPOExtConfig, model_args: ModelConfig, **options
) -> GRPOExtTrainer:
    """Load tokenizer and model as `model_args` asks; `options` go to the trainer."""
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
        padding_side="left",
    )
    if tokenizer.chat_template is None:
        # A base model continues plain text; the example shows it where to stop.
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else '') + '\n' }}{% endfor %}"
        )
    # Given a name rather than a model, the trainer loads it the way DeepSpeed and FSDP need.
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    # The first evaluation belongs inside train(), where the model is already wrapped for DDP, FSDP or DeepSpeed.
    args.eval_on_start = True
    trainer = GRPOExtTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        **options,
    )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ComponentBar)
    return trainer


# --- Report -----------------------------------------------------------------------------------------------------------


def component_means(logs: dict, prefix: str) -> dict[str, float]:
    """Pick the mean of each reward component, `<prefix><name>/mean`, out of one entry of the log."""
    means = {name: logs.get(f"{prefix}{name}/mean") for name in component_names([logs])}
    return {name: mean for name, mean in means.items() if mean is not None}


def before_and_after(before: dict, after: dict) -> list[dict]:
    return [
        {
            "component": name,
            "before": before[name],
            "after": after[name],
            "change": round(after[name] - before[name], 4),
        }
        for name in after
        if name != "n"
    ]


def print_table(title: str, rows: list[dict]) -> None:
    table = Table(title=title, min_width=64)
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "component" else "right")
    for row in rows:
        table.add_row(row["component"], f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['change']:+.3f}")
    Console().print(table)


def plot_curves(history: list[dict], path: Path) -> None:
    def curve(key: str) -> list[tuple[int, float]]:
        return [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]

    names = sorted({name for entry in history for name in component_means(entry, "rewards/")})
    panels = {
        "reward components": [f"rewards/{name}/mean" for name in names],
        "completion length (tokens)": ["completions/mean_length"],
        "loss": ["loss"],
        "gradient norm": ["grad_norm"],
        "entropy (nats)": ["entropy"],
        "KL to the reference (nats)": ["kl"],
        "share of tokens clipped": ["clip_fraction_low", "clip_fraction_high"],
        "policy ratio": ["probs_ratio"],
    }
    # What is logged depends on the loss: there is no KL without a reference, for one.
    panels = {title: keys for title, keys in panels.items() if any(curve(key) for key in keys)}
    # A figure of its own, without pyplot, draws to a file whatever display there is.
    figure = Figure(figsize=(16, 6), layout="constrained")
    figure.suptitle("lines: training, dots: held out")
    for position, (title, keys) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(2, 4, position, title=title, xlabel="step")
        for index, key in enumerate(keys):
            for points, style in ((curve(key), "-"), (curve(f"eval_{key}"), "o")):
                label = key.removeprefix("rewards/").removesuffix("/mean") if style == "-" else None
                axis.plot([x for x, _ in points], [y for _, y in points], style, color=f"C{index}", label=label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(keys) > 1:
            axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(keys))
    figure.savefig(path, dpi=100)


def report(trainer: GRPOExtTrainer, model_name: str, seconds: float) -> None:
    args, history = trainer.args, trainer.state.log_history
    evaluations = [means for entry in history if (means := component_means(entry, "eval_rewards/"))]
    answers = len(trainer.eval_dataset) * trainer.num_generations_eval
    before, after = (
        {**{f"reward/{name}": round(value, 4) for name, value in means.items()}, "n": answers}
        for means in (evaluations[0], evaluations[-1])
    )
    title = f"Held-out prompts, {answers} answers sampled at temperature {args.temperature:g}"
    rows = before_and_after(before, after)
    print_table(title, rows)
    summary = {
        "model": model_name,
        "seconds": round(seconds, 1),
        "steps": trainer.state.global_step,
        "seed": args.seed,
        "eval": {"before": before, "after": after},
    }
    output_dir = Path(args.output_dir)
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_curves(history, output_dir / "curves.png")
    trainer.write_report(tables={title: rows})
    print(f"Model, summary.json, curves.png and report.html are in {output_dir}, after {seconds:.0f} seconds.")


def train_and_report(trainer: GRPOExtTrainer, model_name: str, start: float, dataset_name: str | None = None) -> None:
    resume = trainer.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint={"true": True, "false": None}.get(str(resume).lower(), resume))
    trainer.evaluate()
    trainer.save_model(trainer.args.output_dir)
    on_hub = dataset_name is not None and not Path(dataset_name).is_file()
    trainer.create_model_card(Path(trainer.args.output_dir).name, dataset_name=dataset_name if on_hub else None)
    if trainer.is_world_process_zero():
        report(trainer, model_name, time.perf_counter() - start)
    # The others wait for the report: gloo hangs in its end when a process has already left.
    trainer.accelerator.wait_for_everyone()
    trainer.end()


# --- Run --------------------------------------------------------------------------------------------------------------


def parse_arguments(script_arguments: type, defaults: dict, words: list[str] | None = None):
    """Read `script_arguments`, the training and the model; the command line wins over the YAML file over `defaults`.

    `words` stand in the place of the command line.
    """
    parser = TrlParser((script_arguments, GRPOExtConfig, ModelConfig), allow_abbrev=False)
    parser.set_defaults_with_config(**defaults, **_cpu.defaults())
    *parts, unknown = parser.parse_args_and_config(words, return_remaining_strings=True)
    if unknown:
        near = get_close_matches(
            unknown[0].partition("=")[0], [f"--{option.name}" for part in parts for option in fields(part)], n=1
        )
        raise ValueError(f"There is no option {unknown[0]}." + (f" Did you mean {near[0]}?" if near else ""))
    script_args, args, model_args = parts
    if args.use_cpu:
        _cpu.use_all_cores()
    return script_args, args, model_args


def main() -> None:
    start = time.perf_counter()
    script_args, args, model_args = parse_arguments(ScriptArguments, DEFAULTS)
    model_args.model_name_or_path = model_args.model_name_or_path or _smollm2.locate()
    trainer = build_trainer(script_args, args, model_args)
    train_and_report(trainer, model_args.model_name_or_path, start, script_args.dataset_name)


if __name__ == "__main__":
    main()

r"""Teach Qwen2.5-1.5B-Instruct to answer GSM8K so that a program can read it: three rewards, by GDPO, on a GPU.

    accelerate launch recipes/gdpo_gsm8k.py
    accelerate launch recipes/gdpo_gsm8k.py --use_vllm --vllm_mode colocate
    accelerate launch recipes/gdpo_gsm8k.py --output_dir outputs/grpo_gsm8k \
        --adv_estimator '{"name": "grpo", "use_leave_one_out_baseline": false}'
    accelerate launch recipes/gdpo_gsm8k.py --dataset_name gsm8k.jsonl --model_name_or_path my/model

The settings are those with which the GDPO paper (arXiv:2601.05242, section 4.1 and appendix D) trains this model to
call tools, for a format and a correctness reward. The paper has no table for GSM8K, so the columns on the right are for
who runs the first and the third command; its own are the averages of table 1, on BFCL-v3.

    | %           | paper: GRPO | paper: GDPO | GSM8K: before | GSM8K: GRPO | GSM8K: GDPO |
    | ----------- | ----------- | ----------- | ------------- | ----------- | ----------- |
    | correctness | 30.18       | 32.81       |               |             |             |
    | format      | 76.33       | 80.66       |               |             |             |
    | integer     | none        | none        |               |             |             |
"""

import re
import time
from dataclasses import dataclass

from datasets import Dataset
from gdpo_math import (
    NUMBER,
    TAG,
    DatasetArguments,
    dataset_problems,
    hold_out,
    make_trainer,
    parse_arguments,
    same_value,
    train_and_report,
    whole_eval_batches,
)

# --- Data -------------------------------------------------------------------------------------------------------------

INSTRUCTION = (
    "Think first, then answer with a whole number, like this: <think>6 boxes of 4 eggs are 24 eggs.</think>"
    "<answer>24</answer>"
)


def to_dataset(problems: list[dict]) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": INSTRUCTION},
                    {"role": "user", "content": problem["question"]},
                ],
                "answer": problem["answer"],
            }
            for problem in problems
        ]
    )


# --- Rewards ----------------------------------------------------------------------------------------------------------

INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
WELL_FORMED = re.compile(rf"\s*<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*", re.DOTALL)
INTEGER = re.compile(r"\s*-?\d+\s*")


def gsm8k_reward(completions, answer, **kwargs) -> dict[str, list[float]]:
    """Score each completion by three components, each 0 or 1.

    - format: a `<think>` block, an `<answer>` block, and nothing else
    - correctness: the last `<answer>` holds the gold answer; without one, the last number of the text is it
    - integer: the last `<answer>` is digits and nothing else
    """
    form, correctness, integer = [], [], []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion[0]["content"]
        tags = TAG.findall(text)
        # A right answer without tags counts, so that this component is about mathematics and `format` about tags.
        said = tags[-1:] or NUMBER.findall(text.replace(",", ""))[-1:]
        form.append(float(WELL_FORMED.fullmatch(text) is not None))
        correctness.append(float(bool(said) and same_value(said[0], gold)))
        integer.append(float(bool(tags) and INTEGER.fullmatch(tags[-1]) is not None))
    return {"format": form, "correctness": correctness, "integer": integer}


# --- Config -----------------------------------------------------------------------------------------------------------


@dataclass
class ScriptArguments(DatasetArguments):
    """What the recipe asks beside the training and the model."""

    dataset_name: str = "openai/gsm8k"
    dataset_config: str | None = "main"
    eval_prompts: int = 256


DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "output_dir": "outputs/gdpo_gsm8k",
    "adv_estimator": {"name": "gdpo", "use_leave_one_out_baseline": False},
    "beta": 0.001,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    # On one GPU: 512 prompts with 4 rollouts each at a time, in 4 updates of 128 prompts; 100 times.
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 32,
    "steps_per_generation": 128,
    "max_steps": 400,
    "num_generations": 4,
    "max_completion_length": 1024,
    "per_device_eval_batch_size": 64,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "ddp_find_unused_parameters": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def main() -> None:
    start = time.perf_counter()
    script_args, args, model_args = parse_arguments(ScriptArguments, DEFAULTS)
    held_out_size = whole_eval_batches(script_args.eval_prompts, args)
    train, held_out = hold_out(dataset_problems(script_args), held_out_size, args.seed)
    trainer = make_trainer(gsm8k_reward, to_dataset(train), to_dataset(held_out), args, model_args)
    train_and_report(trainer, model_args.model_name_or_path, start, script_args.dataset_name)


if __name__ == "__main__":
    main()

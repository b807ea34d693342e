"""Teach a small model to use a calculator: three rewards that the environment of a rollout counts itself, by GDPO.

    accelerate launch recipes/tool_use.py
    accelerate launch recipes/tool_use.py --use_peft --learning_rate 1e-5 --max_steps 200

The model needs a chat template that can call tools. Every field of `GRPOExtConfig` and `trl.ModelConfig` is an option.
"""

import ast
import operator
import random
import time
from dataclasses import dataclass, field
from fractions import Fraction

from datasets import Dataset
from gdpo_math import make_trainer, parse_arguments, train_and_report, whole_eval_batches

# --- Data -------------------------------------------------------------------------------------------------------------

INSTRUCTION = "Work it out with the calculator, then submit the result."


def problems(count: int, seed: int) -> Dataset:
    """Sums too long to do in one's head, such as (4831 - 27) * 956, all different."""
    rng = random.Random(seed)
    expressions: dict[str, None] = {}
    while len(expressions) < count:
        a, b, c = rng.randint(1000, 9999), rng.randint(10, 99), rng.randint(100, 999)
        expressions[rng.choice((f"{a} * {b} - {c}", f"({a} - {b}) * {c}", f"{a} + {b} * {c}"))] = None
    return Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": INSTRUCTION},
                    {"role": "user", "content": f"What is {expression}?"},
                ],
                "answer": str(evaluate(expression)),
            }
            for expression in expressions
        ]
    )


# --- Environment ------------------------------------------------------------------------------------------------------

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> Fraction:
    """Numbers, + - * / and parentheses, exactly. Nothing else of Python is looked at, and nothing is executed."""
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")

    def value(node: ast.AST) -> Fraction:
        match node:
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
                return Fraction(str(node.value))
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / and parentheses are understood")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("this is no arithmetic expression") from None


class Calculator:
    """The environment of one rollout. Its public methods are the tools that the model sees, with their docstrings."""

    def reset(self, answer: str, **columns) -> None:
        self.gold = Fraction(answer)
        self.submitted = None
        self.calls = self.evaluated = 0

    def calculate(self, expression: str) -> str:
        """Evaluates an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses.

        Returns:
            The value.
        """
        self.calls += 1
        value = evaluate(expression)  # an error goes to the model as the tool's answer
        self.evaluated += 1
        return str(value)

    def submit(self, result: str) -> str:
        """Submits the result. The last submission counts.

        Args:
            result: A number.

        Returns:
            A receipt.
        """
        self.submitted = evaluate(str(result))
        return "submitted"

    def get_reward(self) -> dict[str, float]:
        """Score the rollout by three components in [0, 1].

        - correctness: the result that was submitted is right
        - valid_calls: share of the calls of the calculator that it could evaluate
        - economy: 1 / calls of the calculator, if the result is right
        """
        correctness = float(self.submitted == self.gold)
        return {
            "correctness": correctness,
            "valid_calls": self.evaluated / max(1, self.calls),
            "economy": correctness / max(1, self.calls),
        }


# --- Config -----------------------------------------------------------------------------------------------------------


@dataclass
class ScriptArguments:
    """What the recipe asks beside the training and the model."""

    train_prompts: int = field(default=2000, metadata={"help": "Sums to train on."})
    eval_prompts: int = field(default=64, metadata={"help": "Held-out sums, rounded up to whole eval batches."})


DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "output_dir": "outputs/tool_use",
    "adv_estimator": {"name": "gdpo"},
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "max_steps": 100,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 512,
    "max_tool_calling_iterations": 4,
    "per_device_eval_batch_size": 64,
    "num_generations_eval": 4,
    "ddp_find_unused_parameters": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def main() -> None:
    start = time.perf_counter()
    script_args, args, model_args = parse_arguments(ScriptArguments, DEFAULTS)
    held_out_size = whole_eval_batches(script_args.eval_prompts, args)
    sums = problems(held_out_size + script_args.train_prompts, args.seed)
    held_out, train = sums.select(range(held_out_size)), sums.select(range(held_out_size, len(sums)))
    # The environment scores its own rollouts, so there is no reward function.
    trainer = make_trainer(None, train, held_out, args, model_args, environment_factory=Calculator)
    train_and_report(trainer, model_args.model_name_or_path, start)


if __name__ == "__main__":
    main()

r"""Does GDPO help? GRPO on the sum of the rewards, GDPO and REINFORCE++: the same model, data, seeds, loss and budget.

    python recipes/study_gdpo_vs_grpo.py
    python recipes/study_gdpo_vs_grpo.py --seeds 1 2 3 4 5 6 7 8 --length_units tokens
    python recipes/study_gdpo_vs_grpo.py --output_dir outputs/study_smollm2 --length_units tokens \
        --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --learning_rate 1e-5 --max_steps 16 --eval_steps 8 \
        --per_device_train_batch_size 32 --per_device_eval_batch_size 56 --num_generations_eval 4
    accelerate launch recipes/study_gdpo_vs_grpo.py --output_dir outputs/study_qwen \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name ChilleD/SVAMP --learning_rate 1e-6 \
        --max_steps 200 --eval_steps 20 --max_completion_length 256 --length_budget 64 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --per_device_eval_batch_size 128

The rewards are `correctness` and `format`, 0 or 1, and `length`, which every answer earns, right or wrong. It is given
in two units: as a share from 0 to 1, and as the number of tokens that were saved, as one would write it down without a
thought for scale. All weights are 1.

Without `--model_name_or_path` a tiny model is made first. A run that has finished is kept in `output_dir` and not run
again, so an interrupted study goes on where it was. Every field of `GRPOExtConfig` is an option, but for what the study
decides: the seed and the estimator.
"""

import json
import platform
import shlex
import sys
import time
from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import _cpu
import torch
import transformers
import trl
from _tiny_model import make_tiny_model
from accelerate import PartialState
from gdpo_math import (
    ScriptArguments,
    arithmetic_problems,
    component_means,
    hold_out,
    length_score,
    make_reward,
    make_trainer,
    parse_arguments,
    problems_of,
    to_dataset,
    whole_eval_batches,
)
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown
from scipy.stats import t as student
from transformers import PrinterCallback
from trl import ModelConfig

import hf_grpo_ext
from hf_grpo_ext import AdvEstimatorConfig, GRPOExtConfig

# --- Methods ----------------------------------------------------------------------------------------------------------

# As in the papers: the group's mean and std include the rollout itself.
METHODS = {
    "grpo": {"name": "grpo", "use_leave_one_out_baseline": False},
    "gdpo": {"name": "gdpo", "use_leave_one_out_baseline": False},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus"},
}

# --- Rewards ----------------------------------------------------------------------------------------------------------

COMPONENTS = ("correctness", "format", "length")
UNITS = ("share", "tokens")


def make_study_reward(length_budget: int, max_length: int, unit: float):
    """The rewards of `gdpo_math`, but each answer earns the length reward, from 0 to `unit`."""
    math_reward = make_reward(length_budget, max_length)

    def study_reward(completion_ids, **kwargs) -> dict[str, list[float]]:
        scores = math_reward(completion_ids=completion_ids, **kwargs)
        scores["length"] = [unit * length_score(len(ids), length_budget, max_length) for ids in completion_ids]
        return scores

    return study_reward


# --- Config -----------------------------------------------------------------------------------------------------------


@dataclass
class StudyArguments(ScriptArguments):
    """What is compared, and on how many seeds."""

    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": f"Of {list(METHODS)}."})
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5], metadata={"help": "One run of each kind a seed."})
    length_units: list[str] = field(
        default_factory=lambda: list(UNITS),
        metadata={"help": "What the length reward counts: 'share' (0 to 1), 'tokens' (those that were saved)."},
    )
    length_budget: int = field(default=6, metadata={"help": "Completion tokens up to which the length reward is full."})

    def __post_init__(self):
        """Refuse what cannot be compared."""
        self.methods, self.seeds, self.length_units = (
            list(dict.fromkeys(given)) for given in (self.methods, self.seeds, self.length_units)
        )
        for name, given, known in (("methods", self.methods, METHODS), ("length_units", self.length_units, UNITS)):
            if not given or not set(given) <= set(known):
                raise ValueError(f"--{name} got {given}, but takes some of {list(known)}.")
        if len(self.seeds) < 2:
            raise ValueError(f"--seeds got {self.seeds}, but a confidence interval needs two different seeds or more.")


DEFAULTS = {
    "output_dir": "outputs/study_gdpo_vs_grpo",
    "loss_fn": "dapo",
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 200,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 24,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "per_device_eval_batch_size": 896,
    "num_generations_eval": 16,
    "gradient_checkpointing": False,
    "ddp_find_unused_parameters": False,
    "disable_tqdm": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
}


def arguments(*decided: str) -> tuple[StudyArguments, GRPOExtConfig, ModelConfig]:
    script_args, args, model_args = parse_arguments(StudyArguments, DEFAULTS, [*sys.argv[1:], *decided])
    if model_args.model_name_or_path is None:
        torch.set_num_threads(1)  # on matrices this small, threads wait for each other
    return script_args, args, model_args


# --- Runs -------------------------------------------------------------------------------------------------------------


def run(method: str, unit: str, seed: int, model: str) -> dict:
    """Train once, and return what the held-out answers earn on the way. A length in tokens is told as a share, too."""
    decided = ["--adv_estimator", json.dumps(METHODS[method]), "--seed", str(seed)]
    script_args, args, model_args = arguments(*decided)
    model_args.model_name_or_path = model
    problems, example = problems_of(script_args)
    train, held_out = hold_out(problems, whole_eval_batches(script_args.eval_prompts, args), seed)
    saved = args.max_completion_length - script_args.length_budget if unit == "tokens" else 1
    reward = make_study_reward(script_args.length_budget, args.max_completion_length, saved)
    trainer = make_trainer(reward, to_dataset(train, example), to_dataset(held_out, example), args, model_args)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    trainer.evaluate()  # the last step may lie between two evaluations; where it does not, this one counts
    seconds = time.perf_counter() - start
    curve = {
        entry["step"]: means
        for entry in trainer.state.log_history
        if (means := component_means(entry, "eval_rewards/"))
    }
    for means in curve.values():
        means["length"] /= saved
    return {
        "method": method,
        "length_unit": unit,
        "seed": seed,
        "seconds": round(seconds, 1),
        "steps": list(curve),
        **{name: [round(means[name], 4) for means in curve.values()] for name in COMPONENTS},
    }


# --- Report -----------------------------------------------------------------------------------------------------------


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Mean over the seeds, and half the width of its 95% confidence interval (Student's t)."""
    standard_error = stdev(values) / len(values) ** 0.5
    return fmean(values), float(student.ppf(0.975, len(values) - 1)) * standard_error


def runs_of(study: dict, unit: str, method: str) -> list[dict]:
    return [run for run in study["runs"] if (run["length_unit"], run["method"]) == (unit, method)]


def at_the_end(run: dict) -> dict[str, float]:
    return {name: run[name][-1] for name in COMPONENTS} | {"correctness on the way": fmean(run["correctness"])}


def table(study: dict) -> str:
    """A Markdown table: what the answers earn before and after, and what GDPO gains on the others at equal seeds.

    "correctness on the way" is the mean of all evaluations: a method that gets there earlier has more of it.
    """
    columns = (*COMPONENTS, "correctness on the way")
    lines = [
        f"| length in | mean of {len(study['seeds'])} seeds | " + " | ".join(columns) + " |",
        "| --- | --- |" + " ---: |" * len(columns),
    ]
    for unit in study["length_units"]:
        of = {method: runs_of(study, unit, method) for method in study["methods"]}
        before = [fmean(run[name][0] for runs in of.values() for run in runs) for name in COMPONENTS]
        lines.append(f"| {unit} | before | " + " | ".join(f"{mean:.3f}" for mean in before) + " | |")
        for method, runs in of.items():
            ends = [at_the_end(run) for run in runs]
            cells = [mean_and_interval([end[name] for end in ends]) for name in columns]
            shown = [f"{mean:.3f} ± {half:.3f}" for mean, half in cells]
            lines.append(f"| {unit} | `{method}` | " + " | ".join(shown) + " |")
        for method in [name for name in of if name != "gdpo"] if "gdpo" in of else []:
            pairs = [(at_the_end(a), at_the_end(b)) for a, b in zip(of["gdpo"], of[method], strict=True)]
            cells = [mean_and_interval([a[name] - b[name] for a, b in pairs]) for name in columns]
            # Bold where the interval leaves out 0.
            marks = ["**" if abs(mean) > half else "" for mean, half in cells]
            shown = [f"{mark}{mean:+.3f} ± {half:.3f}{mark}" for mark, (mean, half) in zip(marks, cells, strict=True)]
            lines.append(f"| {unit} | `gdpo` minus `{method}` | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def plot(study: dict, path: Path) -> None:
    """Draw each component on the way, for each unit of length: mean over the seeds and its 95% interval."""
    units, methods = study["length_units"], study["methods"]
    figure = Figure(figsize=(11, 3.2 * len(units)), layout="constrained")
    axes = figure.subplots(len(units), len(COMPONENTS), squeeze=False, sharex=True, sharey="col")
    for (row, unit), (column, name) in product(enumerate(units), enumerate(COMPONENTS)):
        axis = axes[row, column]
        axis.set_title(name, fontsize="medium")
        axis.set_xlabel("step" if row == len(units) - 1 else "")
        axis.set_ylabel(f"length reward in {unit}" if column == 0 else "")
        axis.grid(alpha=0.3)
        for index, method in enumerate(methods):
            runs = runs_of(study, unit, method)
            points = [mean_and_interval(list(at_step)) for at_step in zip(*(run[name] for run in runs), strict=True)]
            steps, mean = runs[0]["steps"], [mean for mean, _ in points]
            axis.plot(steps, mean, color=f"C{index}", label=method)
            low, high = [mean - half for mean, half in points], [mean + half for mean, half in points]
            axis.fill_between(steps, low, high, color=f"C{index}", alpha=0.2, linewidth=0)
    axes[0, 0].legend()
    figure.savefig(path, dpi=100)


def report(study: dict, folder: Path) -> None:
    text = table(study)
    (folder / "study.json").write_text(json.dumps(study) + "\n")
    (folder / "study.md").write_text(text)
    plot(study, folder / "study.png")
    Console().print(Markdown(text))
    print(f"study.json, study.md and study.png are in {folder}.")


# --- Run --------------------------------------------------------------------------------------------------------------


# The study decides these; everything else is the same in every run of it.
DECIDED = {"methods", "seeds", "length_units", "seed", "adv_estimator", "output_dir"}


def settings_of(*parts: object) -> dict[str, str]:
    """Every setting that differs from its default."""
    found = {}
    for part in parts:
        for setting in fields(part):
            default = setting.default if setting.default_factory is MISSING else setting.default_factory()
            if setting.init and setting.name not in DECIDED and getattr(part, setting.name) != default:
                found[setting.name] = str(getattr(part, setting.name))
    return found


def machine(on_cpu: bool) -> str:
    if on_cpu:
        return f"{platform.machine()}, {_cpu.cores()} cores, {torch.get_num_threads()} threads"
    kind = torch.accelerator.current_accelerator().type
    name = torch.cuda.get_device_name() if kind == "cuda" else kind
    return f"{torch.accelerator.device_count()} x {name}"


def refuse(script_args: StudyArguments, args: GRPOExtConfig, model: str | None) -> None:
    """Raise where a setting would be taken from the study, or spoil it."""
    if args.adv_estimator != AdvEstimatorConfig() or args.seed != GRPOExtConfig.seed:
        raise ValueError(
            "The study sets the seed and the estimator: use --seeds and --methods instead, and no file that sets them."
        )
    if args.resume_from_checkpoint:
        raise ValueError(
            "The study goes on by itself after the last run that has finished: no --resume_from_checkpoint."
        )
    if script_args.length_budget >= args.max_completion_length:
        raise ValueError(
            f"--length_budget {script_args.length_budget} must be below --max_completion_length "
            f"{args.max_completion_length}: else there are no tokens to save."
        )
    if script_args.dataset_name and model is None:
        raise ValueError("The tiny model knows arithmetic alone: --dataset_name needs --model_name_or_path.")


def main() -> None:
    script_args, args, model_args = arguments()
    refuse(script_args, args, model_args.model_name_or_path)
    folder, state = Path(args.output_dir), PartialState()
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    settings = settings_of(script_args, args, model_args)
    model = model_args.model_name_or_path
    if model is None:
        model = str(folder / f"model_{script_args.max_operand}")
        with state.local_main_process_first():
            if not (Path(model) / "tokenizer.json").exists():  # saved last
                print("Making a tiny model, which takes half a minute.")
                make_tiny_model(Path(model), arithmetic_problems(script_args.max_operand))
    runs = []
    for seed, unit, method in product(script_args.seeds, script_args.length_units, script_args.methods):
        file = folder / "runs" / f"{unit}-{method}-{seed}.json"
        if not file.exists():
            done = run(method, unit, seed, model) | {"settings": settings}
            if state.is_main_process:
                unfinished = file.with_suffix(".tmp")
                unfinished.write_text(json.dumps(done))
                unfinished.replace(file)
                earned = ", ".join(f"{name} {done[name][0]:.2f} -> {done[name][-1]:.2f}" for name in COMPONENTS)
                print(f"{method}, length in {unit}, seed {seed}: {earned}, {done['seconds']:.0f} s", flush=True)
            state.wait_for_everyone()
        runs.append(json.loads(file.read_text()))
        if (made_with := runs[-1].pop("settings")) != settings:
            differ = ", ".join(sorted({name for name, _ in made_with.items() ^ settings.items()}))
            raise ValueError(f"{file} was made with other settings ({differ}): use another --output_dir.")
    study = {
        "command": shlex.join(["python", "recipes/study_gdpo_vs_grpo.py", *sys.argv[1:]]),
        "machine": machine(args.use_cpu),
        "versions": {module.__name__: module.__version__ for module in (hf_grpo_ext, trl, transformers, torch)},
        "model": model_args.model_name_or_path or "tiny",
        "settings": settings,
        "seeds": script_args.seeds,
        "length_units": script_args.length_units,
        "methods": script_args.methods,
        "runs": runs,
    }
    if state.is_main_process:
        report(study, folder)


if __name__ == "__main__":
    main()

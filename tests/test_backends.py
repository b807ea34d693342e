"""DDP, FSDP2 and ZeRO train two processes to the weights of one, from the files that a user launches with.

`BACKENDS_TABLE=benchmarks/backends.md` writes the worst differences there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from test_distributed import SETTINGS
from tiny import ADAPTER, save_tiny_adapter, save_tiny_model
from tiny_env import check_same_log
from torch import nn
from transformers import AutoModelForCausalLM

WORKER = Path(__file__).parent / "workers" / "matrix.py"
RECIPES = Path(__file__).parent.parent / "recipes" / "accelerate"
BACKENDS = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
BATCH_SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size")
SGD, ADAMW = 1e-6, 2e-6  # the largest difference of any weight

PRESETS: dict[str, dict[str, Any]] = {
    "gdpo": {"adv_estimator": "gdpo", "loss_fn": "dapo"},
    "gspo": {"adv_estimator": "grpo", "loss_fn": "gspo", "num_iterations": 2},
}
SIX_ROWS = {"per_device_train_batch_size": 6}  # a group of four stands across both processes
FULL = {"learning_rate": 0.01}
LORA = {"lora": {}, "learning_rate": 0.05}
# A step of AdamW is as long where the gradient is hardly more than its rounding as anywhere else: the differences are
# those of a few such weights, and in proportion to the learning rate.
ADAM = {"optim": "adamw_torch", "learning_rate": 5e-4}

CASES: dict[str, dict[str, Any]] = {
    f"{preset}, {kind}, KL {beta}": {**fields, **weights, **SIX_ROWS, "beta": beta}
    for preset, fields in PRESETS.items()
    for kind, weights in {"full": FULL, "LoRA": LORA}.items()
    for beta in (0.0, 0.1)
}
BOTH_LAYOUTS = ["gdpo, full, KL 0.1", "gdpo, LoRA, KL 0.1"]
CASES |= {f"{name}, rows alone": {**CASES[name], "shared_prompt_forward": False} for name in BOTH_LAYOUTS}
GDPO = {**PRESETS["gdpo"], **FULL}
ADAPTED = {**PRESETS["gdpo"], **SIX_ROWS, "learning_rate": 0.05, "beta": 0.1}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CASES |= {
    "gdpo, full, KL 0.1, AdamW": {**CASES["gdpo, full, KL 0.1"], **ADAM},
    "gdpo, LoRA, KL 0.1, AdamW": {**CASES["gdpo, LoRA, KL 0.1"], **ADAM},
    "accumulation 2": {**GDPO, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "beta": 0.1},
    "two steps a generation": {
        **GDPO,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "a process all masked": {
        **GDPO,
        "per_device_train_batch_size": 8,
        "mask_truncated_completions": True,
        "truncated": "2345",
    },
    # Not GDPO, which whitens a group of equal rewards away from 0.
    "a process without signal": {**FULL, "per_device_train_batch_size": 8, "silent": "2345"},
    "one process has long rows": {
        **GDPO,
        "per_device_train_batch_size": 8,
        "long": "2389",
        "max_completion_length": 24,
    },
    "resumed between two steps a generation": {
        **GDPO,
        **ADAM,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "resumes": True,
    },
    "resumed, LoRA": {**CASES["gdpo, LoRA, KL 0.1"], **ADAM, "resumes": True},
    # An adapter on disk, with a whole head, is trained on; its reference is a frozen copy of it.
    "an adapter continued, KL 0.1": {**ADAPTED, "continues": "default"},
    "an adapter named policy, KL 0.1": {**ADAPTED, "continues": "policy"},
    "resumed, an adapter named policy": {**ADAPTED, **ADAM, "continues": "policy", "resumes": True},
    "DoRA, KL 0.1": {**ADAPTED, "lora": {"use_dora": True}},
    "rsLoRA and the whole head, KL 0.1": {**ADAPTED, "lora": {"use_rslora": True, "modules_to_save": ["lm_head"]}},
    "LoRA and the whole embedding, KL 0.1": {**ADAPTED, "lora": {"modules_to_save": ["embed_tokens"]}},
    "gradient checkpointing, full": {**CASES["gdpo, full, KL 0.1"], "gradient_checkpointing": True},
    "gradient checkpointing, LoRA": {**CASES["gdpo, LoRA, KL 0.1"], "gradient_checkpointing": True},
    "reentrant checkpointing, full": {**CASES["gdpo, full, KL 0.1"], **REENTRANT},
    # With an adapter transformers lets DDP look for unused parameters, which does not go with reentrant checkpointing.
    "reentrant checkpointing, LoRA": {**ADAPTED, "lora": {}, **REENTRANT, "ddp_find_unused_parameters": False},
    "evaluation": {
        **CASES["gdpo, LoRA, KL 0.1"],
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "num_generations_eval": 2,
    },
    "a layer refuses packed rows": {**CASES["gdpo, full, KL 0.1"], "refuses": True},
    "dynamic sampling": {**GDPO, "per_device_train_batch_size": 8, "use_dynamic_sampling": True, "silent": "01467"},
}


def has_adapter(case: str) -> bool:
    return bool({"lora", "continues"} & CASES[case].keys())


WITH_KL = [name for name, fields in CASES.items() if fields.get("beta")]

# Of these the weights are not compared.
OTHER_CASES: dict[str, dict[str, Any]] = {
    "generated": {
        **GDPO,
        "per_device_train_batch_size": 8,
        "generates": True,
        "max_steps": 2,
        "max_completion_length": 12,
        "generation_kwargs": {"do_sample": False},
        # Some words end a completion too, so that the processes finish at different tokens.
        "ends": list(range(1, 46, 5)),
    },
    "bf16, full": {**CASES["gdpo, full, KL 0.1"], "bf16": True},
    # Completions are forced, so that the first forward is the reference's, which has the adapter off.
    "bf16, LoRA": {**CASES["gdpo, LoRA, KL 0.1"], "bf16": True},
    "bf16, LoRA, rows alone": {**CASES["gdpo, LoRA, KL 0.1"], "bf16": True, "shared_prompt_forward": False},
}


def launch(folder: Path, model: str, backend: str | None, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs the cases in two processes of a backend, or in one process."""
    out = folder / f"{backend}.pt"
    run_worker(folder, backend, WORKER, model, str(out), json.dumps(cases))
    results: dict[str, Any] = torch.load(out, weights_only=False)
    return results


def run_worker(folder: Path, backend: str | None, worker: Path, *arguments: str) -> None:
    """Runs a script to its end, in two processes of a backend or in one process."""
    launcher = []
    if backend is not None:
        config = folder / f"{backend}.yaml"
        config.write_text(yaml.safe_dump(on_two_cpu_processes(backend)))
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    done = subprocess.run(
        [sys.executable, *launcher, str(worker), *arguments],
        env=os.environ | SETTINGS | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def on_two_cpu_processes(backend: str) -> dict[str, Any]:
    """What a user launches with, on two CPU processes."""
    config: dict[str, Any] = yaml.safe_load((RECIPES / f"{backend}.yaml").read_text())
    changes = {"num_processes": 2, "mixed_precision": "no", **({"use_cpu": True} if backend == "ddp" else {})}
    assert changes.keys() <= config.keys()
    return config | changes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    save_tiny_adapter(Path(folder) / "adapter", folder, modules_to_save=["lm_head"])
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, model: str) -> dict[str, Any]:
    """Every case in one process, with the rows of both and no interruption."""
    cases = {
        name: {**fields, **{size: 2 * fields[size] for size in BATCH_SIZES if size in fields}, "resumes": False}
        for name, fields in (CASES | OTHER_CASES).items()
    }
    return launch(tmp_path_factory.mktemp("one"), model, None, cases)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install 'hf_grpo_ext[distributed]'")
    return name


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: str, backend: str) -> dict[str, Any]:
    return launch(tmp_path_factory.mktemp("two"), model, backend, CASES | OTHER_CASES)


WORST: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module", autouse=True)
def table_of_differences() -> Any:
    yield
    if target := os.environ.get("BACKENDS_TABLE"):
        Path(target).write_text(table(WORST))


def table(worst: dict[str, dict[str, float]]) -> str:
    names = [name for name in BACKENDS if any(name in row for row in worst.values())]
    lines = [
        "# Two processes beside one",
        "",
        "    BACKENDS_TABLE=benchmarks/backends.md pytest tests/test_backends.py",
        "",
        "The largest difference of any weight after three optimizer steps: two CPU processes beside one with the same",
        f"rows, float32. The weights moved by `moved`; the bound is {SGD:.0e} with SGD and {ADAMW:.0e} with AdamW.",
        "",
        "| case | moved | " + " | ".join(names) + " |",
        "| --- |" + " --- |" * (len(names) + 1),
    ]
    for case, row in worst.items():
        cells = [f"{row[name]:.1e}" if name in row else "" for name in ("moved", *names)]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def bound(case: str) -> float:
    return ADAMW if "optim" in CASES[case] else SGD


def policy_and_reference(model: str, case: str, weights: dict[str, torch.Tensor]) -> tuple[nn.Module, nn.Module]:
    """By transformers and PEFT alone: the policy with the weights given, and the reference as it is on disk."""
    fields = CASES[case]
    policy, reference = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    if "lora" in fields:
        policy = get_peft_model(policy, LoraConfig(**(ADAPTER | fields["lora"])))
    if "continues" in fields:
        policy = PeftModel.from_pretrained(policy, f"{model}/adapter", adapter_name=fields["continues"])
        reference = PeftModel.from_pretrained(reference, f"{model}/adapter")
    policy.load_state_dict({name: weight for name, weight in weights.items() if ".ref." not in name})
    return policy.double().eval(), reference.double().eval()


def log_probabilities(model: nn.Module, rows: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """Of the tokens of each completion, every row on its own."""
    logits = [model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] for prompt, completion in rows]
    return [
        of_row.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        for of_row, (_, completion) in zip(logits, rows, strict=True)
    ]


@torch.no_grad()
def kl_by_hand(model: str, case: str, result: dict[str, Any]) -> tuple[float, float]:
    """`kl` and `kl_penalty` of the last step: k3, clamped, over all tokens, and as the loss averages it."""
    policy, reference = policy_and_reference(model, case, result["last_weights"])
    pairs = zip(*(log_probabilities(m, result["last_rows"]) for m in (reference, policy)), strict=True)
    log_ratios = [(ref - lp).clamp(-20, 20) for ref, lp in pairs]
    of_rows = [(torch.exp(x) - 1 - x).clamp(max=10) for x in log_ratios]
    of_tokens = torch.cat(of_rows).mean().item()
    by_sequence = torch.stack([row.mean() for row in of_rows]).mean().item()
    return of_tokens, by_sequence if CASES[case]["loss_fn"] == "gspo" else of_tokens


@pytest.mark.distributed
class TestBackends:
    @pytest.mark.parametrize("case", CASES)
    def test_two_processes_train_to_the_weights_of_one(
        self, model: str, one: dict[str, Any], two: dict[str, Any], backend: str, case: str
    ) -> None:
        want, got = one[case], two[case]
        far = want["moved"]
        worst = largest_difference(want["weights"], got["weights"])
        WORST.setdefault(case, {"moved": far})[backend] = worst
        assert far > 1e-3
        assert worst <= bound(case)
        # A run that goes on does not know the rewards that earlier prompts alone had, and averages what is left.
        unlike = ("rewards/first_", "train_loss") if "resumes" in CASES[case] else ()
        check_same_log(want["log"], got["log"], besides=unlike)

    @pytest.mark.parametrize("case", CASES)
    def test_the_backend_is_the_one_that_was_asked_for(self, two: dict[str, Any], backend: str, case: str) -> None:
        got = two[case]
        assert got["processes"] == 2
        bare = "PeftModelForCausalLM" if has_adapter(case) else "Qwen2ForCausalLM"
        assert (got["distributed_type"], got["wrapper"]) == {
            "ddp": ("MULTI_CPU", "DistributedDataParallel"),
            "fsdp2": ("FSDP", f"FSDP{bare}"),
        }.get(backend, ("DEEPSPEED", "DeepSpeedEngine"))
        assert got["zero_stage"] == (int(backend[-1]) if backend.startswith("zero") else None)
        # Both layers, the embedding, the end of the backbone, and the whole.
        assert got["fsdp_units"] >= 5 if backend == "fsdp2" else got["fsdp_units"] == 0
        sharded = backend in ("fsdp2", "zero3")
        assert got["share_held"] == pytest.approx(0.5 if sharded else 1.0, abs=0.02)

    @pytest.mark.parametrize("case", CASES)
    def test_prompts_are_shared(self, one: dict[str, Any], two: dict[str, Any], case: str) -> None:
        has_second_model = CASES[case].get("beta") and not has_adapter(case)
        want = [] if "rows alone" in case else ["refuses" not in case] * (2 if has_second_model else 1)
        for result in (one[case], two[case]):
            assert result["packs"] == want
            assert bool(result["packed_forwards"]) is any(want)

    @pytest.mark.parametrize("case", BOTH_LAYOUTS)
    def test_shared_prompts_train_to_the_weights_of_rows_alone(self, two: dict[str, Any], case: str) -> None:
        assert largest_difference(two[case]["weights"], two[f"{case}, rows alone"]["weights"]) <= SGD

    def test_generation_is_that_of_one_process(self, one: dict[str, Any], two: dict[str, Any]) -> None:
        want, got = one["generated"]["completions"], two["generated"]["completions"]
        assert got == want
        longest = [[max(map(len, rows)) for rows in (batch[:8], batch[8:])] for batch in got]
        assert any(first != second for first, second in longest)

    @pytest.mark.parametrize("case", CASES | OTHER_CASES)
    def test_log_probabilities_are_not_rounded(self, two: dict[str, Any], case: str) -> None:
        assert two[case]["logprob_types"] == {"torch.float32"}

    @pytest.mark.parametrize("kind", ["full", "LoRA"])
    def test_bf16_measures_the_kl_of_float32(self, two: dict[str, Any], kind: str) -> None:
        # Rounded to bf16, the log-probabilities of the full model gave 1.6 times the KL at the second step.
        want, got = two[f"gdpo, {kind}, KL 0.1"]["log"], two[f"bf16, {kind}"]["log"]
        assert want[1]["kl"] > 0
        assert got[1]["kl"] == pytest.approx(want[1]["kl"], rel=0.05)

    @pytest.mark.parametrize("case", [name for name in WITH_KL if has_adapter(name)])
    def test_an_adapter_has_no_kl_at_the_first_step(self, two: dict[str, Any], case: str) -> None:
        assert two[case]["log"][0]["kl"] == 0.0

    @pytest.mark.parametrize("case", WITH_KL)
    def test_the_kl_is_that_to_the_model_or_adapter_on_disk(
        self, model: str, two: dict[str, Any], backend: str, case: str
    ) -> None:
        of_tokens, penalty = kl_by_hand(model, case, two[case])
        (last,) = [entry for entry in two[case]["log"] if entry["step"] == 3 and "kl" in entry]
        assert of_tokens > 1e-4
        assert last["kl"] == pytest.approx(of_tokens, rel=1e-3)
        assert last["kl_penalty"] == pytest.approx(penalty, rel=1e-3)

    def test_there_was_an_evaluation_after_every_step(self, two: dict[str, Any]) -> None:
        evaluations = [entry for entry in two["evaluation"]["log"] if "eval_loss" in entry]
        assert [entry["step"] for entry in evaluations] == [1, 2, 3]
        assert evaluations[0]["eval_kl"] > 0
        assert len({entry["eval_kl"] for entry in evaluations}) == 3

    @pytest.mark.parametrize(
        ("case", "rows"),
        [("a process all masked", "rows_that_count"), ("a process without signal", "rows_with_signal")],
    )
    def test_a_process_had_nothing_to_train_on(self, two: dict[str, Any], case: str, rows: str) -> None:
        first, second, third = two[case][rows]
        assert first[0] > 0
        assert first[1] == 0
        assert second[0] == 0
        assert second[1] > 0
        assert min(third) > 0


def test_the_differences_as_they_were_recorded() -> None:
    page = (Path(__file__).parent.parent / "benchmarks" / "backends.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert rows[0] == ["case", "moved", *BACKENDS]
    assert [row[0] for row in rows[2:]] == list(CASES)
    for case, *cells in rows[2:]:
        assert len(cells) == 1 + len(BACKENDS)
        assert max(map(float, cells[1:])) <= bound(case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recipe_is_one_that_a_user_launches_as_it_is(backend: str) -> None:
    text = (RECIPES / f"{backend}.yaml").read_text()
    assert sum(line.startswith("#") for line in text.splitlines()) <= 2
    config = yaml.safe_load(text)
    assert config["num_processes"] > 1
    assert config["mixed_precision"] == "bf16"
    assert config["distributed_type"] == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(backend, "DEEPSPEED")

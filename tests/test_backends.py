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
from safetensors.torch import load_file
from tiny import save_tiny_model

WORKER = Path(__file__).parent / "workers" / "matrix.py"
RECIPES = Path(__file__).parent.parent / "recipes" / "accelerate"
BACKENDS = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
SGD, ADAMW = 1e-6, 2e-6  # the largest difference of any weight

PRESETS: dict[str, dict[str, Any]] = {
    "gdpo": {"adv_estimator": "gdpo", "loss_fn": "dapo"},
    "gspo": {"adv_estimator": "grpo", "loss_fn": "gspo", "num_iterations": 2},
}
SIX_ROWS = {"per_device_train_batch_size": 6}  # a group of four stands across both processes
FULL = {"learning_rate": 0.01}
LORA = {"lora": True, "learning_rate": 0.1}
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}

CASES: dict[str, dict[str, Any]] = {
    f"{preset}, {kind}, KL {beta}": {**fields, **weights, **SIX_ROWS, "beta": beta}
    for preset, fields in PRESETS.items()
    for kind, weights in {"full": FULL, "LoRA": LORA}.items()
    for beta in (0.0, 0.1)
}
BOTH_LAYOUTS = ["gdpo, full, KL 0.1", "gdpo, LoRA, KL 0.1"]
CASES |= {f"{name}, rows alone": {**CASES[name], "shared_prompt_forward": False} for name in BOTH_LAYOUTS}
GDPO = {**PRESETS["gdpo"], **FULL}
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
    "a layer refuses packed rows": {**CASES["gdpo, full, KL 0.1"], "refuses": True},
    "dynamic sampling": {**GDPO, "per_device_train_batch_size": 8, "use_dynamic_sampling": True, "silent": "01467"},
}

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
    launcher = []
    if backend is not None:
        config = folder / f"{backend}.yaml"
        config.write_text(yaml.safe_dump(on_two_cpu_processes(backend)))
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    out = folder / f"{backend}.pt"
    settings = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), model, str(out), json.dumps(cases)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results: dict[str, Any] = torch.load(out, weights_only=False)
    return results


def on_two_cpu_processes(backend: str) -> dict[str, Any]:
    """What a user launches with, on two CPU processes."""
    config: dict[str, Any] = yaml.safe_load((RECIPES / f"{backend}.yaml").read_text())
    changes = {"num_processes": 2, "mixed_precision": "no", **({"use_cpu": True} if backend == "ddp" else {})}
    assert changes.keys() <= config.keys()
    return config | changes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, model: str) -> dict[str, Any]:
    """Every case in one process, with the rows of both and no interruption."""
    cases = {
        name: fields | {"per_device_train_batch_size": 2 * fields["per_device_train_batch_size"], "resumes": False}
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


def moved(model: str, weights: dict[str, torch.Tensor]) -> float:
    """How far the trained weights went; of an adapter only the half that starts at zero tells."""
    start = load_file(f"{model}/model.safetensors")
    adapters = [value.abs().max().item() for name, value in weights.items() if "lora_B" in name]
    return max(adapters) if adapters else largest_difference(weights, start)


def bound(case: str) -> float:
    return ADAMW if "optim" in CASES[case] else SGD


def losses(result: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in result["log"] if "loss" in entry]


@pytest.mark.distributed
class TestBackends:
    @pytest.mark.parametrize("case", CASES)
    def test_two_processes_train_to_the_weights_of_one(
        self, model: str, one: dict[str, Any], two: dict[str, Any], backend: str, case: str
    ) -> None:
        want, got = one[case], two[case]
        far = moved(model, want["weights"])
        worst = largest_difference(want["weights"], got["weights"])
        WORST.setdefault(case, {"moved": far})[backend] = worst
        assert far > 1e-3
        assert worst <= bound(case)
        assert losses(got) == pytest.approx(losses(want), abs=1e-5)

    @pytest.mark.parametrize("case", CASES)
    def test_the_backend_is_the_one_that_was_asked_for(self, two: dict[str, Any], backend: str, case: str) -> None:
        got = two[case]
        assert got["processes"] == 2
        bare = "PeftModelForCausalLM" if CASES[case].get("lora") else "Qwen2ForCausalLM"
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
        has_reference = CASES[case].get("beta") and not CASES[case].get("lora")
        want = [] if "rows alone" in case else ["refuses" not in case] * (2 if has_reference else 1)
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

    @pytest.mark.parametrize("case", [name for name in CASES if "LoRA, KL 0.1" in name])
    def test_a_new_adapter_has_no_kl_at_the_first_step(
        self, one: dict[str, Any], two: dict[str, Any], case: str
    ) -> None:
        for result in (one[case], two[case]):
            assert result["log"][0]["kl"] == 0.0
            assert result["log"][1]["kl"] != 0.0

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

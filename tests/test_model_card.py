"""The model card: TRL's, and in it the method, its papers, the knobs and the data set."""

from __future__ import annotations

import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.trainer
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard
from tiny import save_tiny_model
from tiny_env import by_completion, constant, make_trainer, quiet

from hf_grpo_ext import PRESETS, AsyncGRPOExtConfig, GRPOExtConfig
from hf_grpo_ext.advantages import ADVANTAGE_ESTIMATORS
from hf_grpo_ext.model_card import add_section, describe_dataset, differences, loss_paper, method
from hf_grpo_ext.papers import ESTIMATOR_PAPERS, LOSS_PAPERS

pytestmark = quiet
ROOT = Path(__file__).parent.parent


def config(**fields: Any) -> GRPOExtConfig:
    return GRPOExtConfig(**({"use_cpu": True, "bf16": False} | fields))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


# The papers


def test_every_method_has_its_paper_and_the_readme_and_the_presets_name_the_same() -> None:
    assert list(ESTIMATOR_PAPERS) == list(ADVANTAGE_ESTIMATORS)
    assert list(LOSS_PAPERS) == list(PRESETS)
    readme = re.findall(r'^\| `"(\w+)"` \|.*\| ([^|]*) \|$', (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    papers = [*ESTIMATOR_PAPERS.items(), *LOSS_PAPERS.items()]
    assert [name for name, _ in readme] == [name for name, _ in papers]
    comments = (ROOT / "hf_grpo_ext" / "loss_config.py").read_text().split("def reject_unknown_keys")[0]
    for (name, paper), (_, cell) in zip(papers, readme, strict=True):
        expected = f"[{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})" if paper.arxiv else "Williams 1992"
        assert cell == expected, name
        if paper in LOSS_PAPERS.values():
            assert (f"arXiv:{paper.arxiv}" if paper.arxiv else "Williams") in comments


@pytest.mark.parametrize("paper", {p.key: p for p in [*ESTIMATOR_PAPERS.values(), *LOSS_PAPERS.values()]}.values())
def test_a_bibtex_entry_is_one(paper: Any) -> None:
    entry = paper.bibtex
    assert re.match(r"@(misc|article)\{\w+,\n", entry)
    assert entry.count("{") == entry.count("}")
    fields = dict(re.findall(r"^  (\w+) = \{(.*)\},$", entry, flags=re.MULTILINE))
    assert fields["title"] == f"{{{paper.title}}}"
    assert fields["year"] == str(paper.year)
    assert fields.get("eprint") == paper.arxiv
    if paper.arxiv:
        assert str(paper.year)[2:] == paper.arxiv[:2]
    else:
        assert fields["journal"]


# The method


@pytest.mark.parametrize(
    ("fields", "name", "cited"),
    [
        ({}, "GRPO and the PPO loss", ["shao2024deepseekmath", "schulman2017ppo"]),
        ({"adv_estimator": "gdpo", "loss_fn": "dapo"}, "GDPO and the DAPO loss", ["liu2026gdpo", "yu2025dapo"]),
        ({"loss_fn": "grpo"}, "GRPO", ["shao2024deepseekmath"]),
        ({"loss_fn": "rloo"}, "GRPO and the RLOO loss", ["shao2024deepseekmath", "ahmadian2024rloo"]),
        ({"loss_type": "dr_grpo"}, "GRPO and the Dr. GRPO loss", ["shao2024deepseekmath", "liu2025drgrpo"]),
        (
            {"adv_estimator": "reinforce_plus_plus", "loss_fn": "reinforce_plus_plus"},
            "REINFORCE++",
            ["hu2025reinforceplusplus"],
        ),
        (
            {"loss_fn": {"name": "dapo", "ratio_clip_max": 0.37}},
            "GRPO and the DAPO loss",
            ["shao2024deepseekmath", "yu2025dapo"],
        ),
    ],
)
def test_the_method_and_what_it_cites(fields: dict[str, Any], name: str, cited: list[str]) -> None:
    found, paper = method(config(**fields))
    assert found == name
    assert re.findall(r"@\w+\{(\w+),", paper["citation"]) == cited
    assert paper["id"] == ESTIMATOR_PAPERS[config(**fields).adv_estimator_config.name].arxiv


def test_the_asynchronous_trainer_names_its_method_too() -> None:
    args = AsyncGRPOExtConfig(use_cpu=True, bf16=False, adv_estimator="gdpo", loss_fn="dapo")
    assert method(args)[0] == "GDPO and the DAPO loss"


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ({"use_cispo": True, "ratio_clip_max": 3.0}, "cispo"),
        ({"token_level_loss": False, "sequence_level_importance_ratios": True, "ratio_clip_max": 0.01}, "gspo"),
        ({"disable_ppo_ratio": True, "ratio_clip_max": 0.3, "token_level_loss": False}, "reinforce"),
        ({"ratio_clip_c": 4.0}, "dual_clip"),
        ({"ratio_clip_max": 0.37}, "ppo"),
    ],
)
def test_a_loss_of_ones_own_cites_what_it_is_a_form_of(loss: dict[str, Any], name: str) -> None:
    assert loss_paper(config(loss_fn=loss)) is LOSS_PAPERS[name]


# The knobs

WITH_KL = {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1", "kl_importance_weight": "policy_ratio"}


@pytest.mark.parametrize(
    "fields",
    [
        *({"loss_fn": name} for name in PRESETS),
        {},
        {"beta": 0.1},
        {"loss_fn": WITH_KL},
        {"beta": 0.1, "loss_fn": {"kl_importance_weight": "score_function"}},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"adv_estimator": {"name": "gdpo", "use_leave_one_out_baseline": False}, "advantage_clip_high": 3.0},
        {"scale_rewards": "none", "reward_weights": {"a": 2.0}, "num_generations": 4, "learning_rate": 1e-5},
        {"use_dynamic_sampling": True, "batch_multiplier": 1.5},
        {
            "loss_fn": {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2.0,
            }
        },
    ],
)
def test_the_knobs_that_differ_make_the_configuration_again(fields: dict[str, Any]) -> None:
    args = config(**fields)
    again = config(**yaml.safe_load(yaml.safe_dump(differences(args))))
    assert again.adv_estimator == args.adv_estimator
    if args.loss_config.reference_policy_kl_penalty:
        assert again.loss_fn == args.loss_fn
    else:  # without a KL, how it would be estimated is not said
        kl = {"kl_input_clamp_value", "kl_output_clamp_value", "kl_importance_weight", "reference_policy_kl_type"}
        ours, theirs = ({k: v for k, v in vars(c.loss_fn).items() if k not in kl} for c in (again, args))
        assert ours == theirs
    for name in ("loss_type", "reward_weights", "learning_rate", "use_dynamic_sampling", "batch_multiplier", "beta"):
        assert getattr(again, name) == getattr(args, name), name


def test_no_secret_and_no_path_is_among_them() -> None:
    args = config(hub_token="hf_secret", output_dir="/home/me/out", run_name="mine")
    assert differences(args) == {"adv_estimator": {"name": "grpo"}, "loss_fn": {"reference_policy_kl_penalty": 0.0}}


def test_what_decides_how_old_a_rollout_gets_is_among_them() -> None:
    on_policy = config(gradient_accumulation_steps=4, lr_scheduler_type="constant")
    assert "steps_per_generation" not in differences(on_policy)
    twice = config(gradient_accumulation_steps=4, steps_per_generation=8, mask_truncated_completions=True)
    assert {"steps_per_generation": 8, "mask_truncated_completions": True}.items() <= differences(twice).items()
    assert yaml.safe_load(yaml.safe_dump(differences(on_policy)))["lr_scheduler_type"] == "constant"


# The data set


def test_the_data_set_says_of_itself_what_it_can() -> None:
    named = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    named.info.dataset_name = "gsm8k"
    assert describe_dataset(named) == "gsm8k, 2 rows, columns prompt, answer"
    assert describe_dataset(named, "openai/gsm8k") == "openai/gsm8k, 2 rows, columns prompt, answer"
    assert describe_dataset([{"prompt": "a"}]) == "1 rows"
    assert describe_dataset(named.to_iterable_dataset()) == "streamed, columns prompt, answer"
    assert describe_dataset(iter([])) == "streamed"


# The card


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def test_the_card_is_written_on_save(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_model,
        tmp_path / "my-run",
        constant({"right": [1.0, 0.0] * 4, "brief": [0.0, 0.0, 1.0, 0.5] * 2}),
        save_strategy="steps",
        save_steps=1,
        adv_estimator="gdpo",
        loss_fn={"name": "dapo", "reference_policy_kl_penalty": 0.1},
        reward_weights={"right": 2.0},
    )
    trainer.train()
    card = card_of(tmp_path / "my-run")
    assert {"trl", "grpo", "hf_grpo_ext", "generated_from_trainer"} <= set(card.data.tags)
    text = card.text
    assert text.count("### Objective") == 1
    headings = re.findall(r"^#+ .*$", text, flags=re.MULTILINE)
    assert headings == [
        "# Model Card for my-run",
        "## Quick start",
        "## Training procedure",
        "### Objective",
        "### Framework versions",
        "## Citations",
    ]
    for line in (
        f"This model is a fine-tuned version of `{Path(tiny_model).name}`.",
        'pipeline("text-generation", model="my-run"',
        "trained with GDPO and the DAPO loss, a method introduced in [GDPO: Group reward-Decoupled",
        "- Advantages: [GDPO](https://arxiv.org/abs/2601.05242)",
        "- Loss: [DAPO](https://arxiv.org/abs/2503.14476)\n",
        "- Rewards: `brief` (weight 1), `right` (weight 2)",
        "- Data: 10 rows, columns prompt",
        "Loss: dapo",
        "A = whiten(sum_k w_k A_k)",
        "@misc{liu2026gdpo,",
        "@misc{yu2025dapo,",
        "vonwerra2020trl",
    ):
        assert line in text, line
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    knobs = yaml.safe_load(block)
    assert knobs["loss_fn"]["reference_policy_kl_penalty"] == 0.1
    assert knobs["loss_fn"]["ratio_clip_max"] == 0.28
    assert knobs["reward_weights"] == {"right": 2.0}


def test_a_data_set_of_the_hub_is_linked(tiny_model: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model, tmp_path, by_completion)
    trainer.create_model_card("name", dataset_name="openai/gsm8k", tags="mine")
    card = card_of(tmp_path)
    assert card.data.datasets == "openai/gsm8k"
    assert "mine" in card.data.tags
    assert "- Data: openai/gsm8k, 10 rows" in card.text


def test_one_process_writes_it(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny_model, tmp_path, by_completion)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.create_model_card("name")
    assert not (tmp_path / "README.md").exists()


def test_a_card_without_the_heading_has_the_section_at_its_end() -> None:
    assert add_section("# Card\n", "### Objective") == "# Card\n\n### Objective\n\n"


def test_push_to_hub_is_trls_and_takes_the_card_along(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> Any:
            calls.append(("create_repo", {"name": name, **options}))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **options: Any) -> Any:
            options["card"] = card_of(Path(options["folder_path"]))
            options["files"] = {path.name for path in Path(options["folder_path"]).iterdir()}
            calls.append(("upload_folder", options))
            done: Future[str] = Future()
            done.set_result("url")
            return done

    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    trainer = make_trainer(tiny_model, tmp_path / "my-run", by_completion, loss_fn="gspo")
    trainer.train()
    trainer.push_to_hub(dataset_name="openai/gsm8k")
    (created, repo), (uploaded, folder) = calls
    assert (created, uploaded) == ("create_repo", "upload_folder")
    assert repo["name"] == "my-run"
    assert folder["repo_id"] == "me/my-run"
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= folder["files"]
    card = folder["card"]
    assert card.data.datasets == "openai/gsm8k"
    assert "hf_grpo_ext" in card.data.tags
    assert 'model="me/my-run"' in card.text
    assert "- Loss: [GSPO](https://arxiv.org/abs/2507.18071)" in card.text

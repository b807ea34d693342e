"""The private parts of TRL that the trainer stands on. This file is meant to fail first when TRL changes them."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from typing import Any

import pytest
import trl
from trl import GRPOTrainer

from hf_grpo_ext.trainer import SEAMS, GRPOExtTrainer

# Fingerprints of the code (without comments and docstrings) as of TRL 1.16.0. When one differs: read TRL's change,
# decide what it means for the override in trainer.py, run the whole suite, then record the new fingerprint.
FINGERPRINTS = {
    "__init__": "e80f4531b23e94bd",
    "_calculate_rewards": "998e876701979003",
    "_compute_loss": "a0773aa2fda0f039",
    "_generate_and_score_completions": "eb8ae2f174e2d691",
    "_generate_single_turn": "90c129d19460f820",
    "_get_per_token_logps_and_entropies": "2e6159c321ddcea5",
    "_prepare_inputs": "5af3fd0e05863c70",
    "_load_optimizer_and_scheduler": "15c2ddb9d080e7a2",
    "_save_checkpoint": "a7d3627bdf466faf",
    "create_model_card": "1e539ccd6f9dec9d",
    "get_high_entropy_mask": "b25108dca83f1f0a",
    "get_off_policy_mask": "021bd342723817ba",
    "training_step": "7898429a45709229",
}

# The trainer and the parts it is made of.
PARTS = [part for part in GRPOExtTrainer.__mro__ if part.__module__.startswith("hf_grpo_ext.")]


def fingerprint(function: Any) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            node.body = body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", sorted({*SEAMS, "__init__"}))
def test_trl_has_not_changed_the_seam(name: str) -> None:
    found = fingerprint(getattr(GRPOTrainer, name))
    assert found == FINGERPRINTS[name], (
        f"TRL {trl.__version__} changed GRPOTrainer.{name}, on which GRPOExtTrainer stands. Read its change, decide "
        f"what it means for hf_grpo_ext/trainer.py, run the whole suite, then set FINGERPRINTS[{name!r}] = {found!r}."
    )


def test_the_overrides_are_the_listed_ones() -> None:
    """What we override of TRL's is listed as a seam; nothing else is."""
    ours = {name for part in PARTS for name, value in vars(part).items() if inspect.isfunction(value)}
    of_transformers = {
        "create_accelerator_and_postprocess",
        "get_batch_samples",
        "save_model",
        "train",
        "_save_rng_state",
    }
    overridden = {name for name in ours if hasattr(GRPOTrainer, name)} - {"__init__"} - of_transformers
    assert overridden <= set(SEAMS), f"overridden, but not listed in SEAMS: {sorted(overridden - set(SEAMS))}"


def test_overrides_call_their_parent() -> None:
    """All but the loss, which is what the class is there to replace."""
    for part in PARTS:
        for name in (set(SEAMS) & set(vars(part))) - {"_compute_loss"}:
            calls = inspect.getsource(part)
            assert f"super().{name}(" in calls or f"super({part.__name__}, self).{name}(" in calls, name


def test_no_statement_of_trls_loss_is_copied() -> None:
    def statements(function: Any) -> set[str]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        return {
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)) and len(ast.unparse(node)) > 60
        }

    theirs = statements(GRPOTrainer._compute_loss) | statements(inspect.unwrap(GRPOTrainer._calculate_rewards))
    ours = {s for p in PARTS for value in vars(p).values() if inspect.isfunction(value) for s in statements(value)}
    assert not ours & theirs

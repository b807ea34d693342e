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
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker, packing

from hf_grpo_ext import async_trainer
from hf_grpo_ext.async_rollouts import RolloutLoop
from hf_grpo_ext.async_trainer import AsyncGRPOExtTrainer
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

# The same of the asynchronous trainer: of the trainer, of what is between the worker and its loss, and of the worker.
ASYNCHRONOUS = {
    "AsyncGRPOTrainer.__init__": "d3e001940bfe321d",
    "AsyncGRPOTrainer._inner_training_loop": "6e80ff46ce3d63c5",
    "AsyncGRPOTrainer._save_checkpoint": "7481febb183f5c45",
    "AsyncGRPOTrainer.compute_loss": "f6ca14c2a9a48048",
    "AsyncGRPOTrainer.get_train_dataloader": "a7ea2cb5e1369035",
    "_EpochStopCallback.on_step_end": "9c5cad738fed58c7",
    "RolloutQueueDataset.__init__": "f4951493a3f431b5",
    "RolloutQueueDataset.__iter__": "5fb462f022b31f84",
    "FixedCountBatcher.__init__": "30e59503e9c2892a",
    "TokenBudgetBatcher.__init__": "81253186fe04d8f7",
    "TreeRow.pack": "7f85560cd40cb71c",
    "DataCollatorForRollout.torch_call": "28681947631ecf46",
    "AsyncRolloutWorker.__init__": "0d971ca2d91b45c1",
    "AsyncRolloutWorker.start": "bdf366e805c5eade",
    "AsyncRolloutWorker.check_health": "05d457f9ef9d41fb",
    "AsyncRolloutWorker.stop": "2de51f8936f1555e",
    "_AsyncRolloutLoop.__init__": "f8b7dab8acfd8d64",
    "_AsyncRolloutLoop.run": "4c646335d4219279",
    "_AsyncRolloutLoop._score_loop": "8e78a8fb98606094",
    "_AsyncRolloutLoop._score_group": "f29992ce390e7c4e",
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


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_trl_has_not_changed_the_asynchronous_seam(name: str) -> None:
    owner, method = name.split(".")
    rooms = [async_grpo_trainer, packing, async_rollout_worker]
    room = next(module for module in rooms if hasattr(module, owner))
    found = fingerprint(getattr(getattr(room, owner), method))
    ours = "async_rollouts.py" if owner == "_AsyncRolloutLoop" else "async_trainer.py"
    assert found == ASYNCHRONOUS[name], (
        f"TRL {trl.__version__} changed {name}, on which AsyncGRPOExtTrainer stands. Read its change, decide what it "
        f"means for hf_grpo_ext/{ours}, run `make test-async`, then set ASYNCHRONOUS[{name!r}] = {found!r}."
    )


def test_the_asynchronous_seams_are_fingerprinted() -> None:
    of_transformers = {"get_batch_samples"}
    assert {f"AsyncGRPOTrainer.{name}" for name in {*async_trainer.SEAMS} - of_transformers} <= set(ASYNCHRONOUS)


def test_the_asynchronous_overrides_are_the_listed_ones() -> None:
    of_transformers = {"create_accelerator_and_postprocess", "get_batch_samples"}
    for ours, theirs, listed in (
        (AsyncGRPOExtTrainer, AsyncGRPOTrainer, {*async_trainer.SEAMS, *of_transformers, "__init__"}),
        (RolloutLoop, async_rollout_worker._AsyncRolloutLoop, {"__init__", "run", "_score_group"}),
    ):
        overridden = {name for name, value in vars(ours).items() if inspect.isfunction(value) and hasattr(theirs, name)}
        assert overridden <= listed, f"overridden, but not listed: {sorted(overridden - listed)}"
        source = inspect.getsource(ours)
        for name in overridden:
            assert f"super().{name}(" in source, name


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
    theirs |= statements(AsyncGRPOTrainer.compute_loss) | statements(
        async_rollout_worker._AsyncRolloutLoop._score_group
    )
    parts = [*PARTS, AsyncGRPOExtTrainer, RolloutLoop]
    ours = {s for p in parts for value in vars(p).values() if inspect.isfunction(value) for s in statements(value)}
    assert not ours & theirs

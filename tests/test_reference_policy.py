"""Whose log-probabilities the KL compares with: the base under a new adapter, a frozen copy, or a second model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ADAPTER, perturbed, save_tiny_adapter, save_tiny_model
from tiny_env import (
    by_completion,
    check_gradient,
    logged,
    make_trainer,
    on_policy_loss,
    quiet,
    rows_of,
    token_logprobs,
    trained,
    weights_of,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

peft = pytest.importorskip("peft")

pytestmark = [quiet, pytest.mark.slow]
BETA = 0.3


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


def base(tiny_model: str) -> nn.Module:
    """The model as it is on disk, loaded by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an adapter that has learned something."""
    return save_tiny_adapter(tmp_path_factory.mktemp("adapter"), tiny_model)


def train(kind: str, tiny_model: str, adapter: str, folder: Path, **args: Any) -> tuple[Any, nn.Module]:
    """A trainer after three steps, and its reference, made anew from what is on disk."""
    if kind == "new adapter":
        model, extra, reference = tiny_model, {"peft_config": peft.LoraConfig(**ADAPTER)}, base(tiny_model)
    elif kind in CONTINUED:
        model, extra = loaded(tiny_model, adapter, NAMES[kind]), {}
        reference = peft.PeftModel.from_pretrained(base(tiny_model), adapter)
    else:
        model, extra, reference = tiny_model, {}, base(tiny_model)
    defaults = {"max_steps": 3, "beta": BETA, "learning_rate": 0.02 if "adapter" in kind else 0.002}
    trainer = make_trainer(model, folder, by_completion, trainer=extra, **(defaults | args))
    trainer.before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return trainer, reference.eval()


def loaded(tiny_model: str, adapter: str, name: str) -> Any:
    """The adapter on disk under a name, to be trained on."""
    return peft.PeftModel.from_pretrained(base(tiny_model), adapter, adapter_name=name, is_trainable=True)


NAMES = {"new adapter": "default", "continued adapter": "default", "continued adapter, named": "policy"}
CONTINUED = ["continued adapter", "continued adapter, named"]
KINDS = [*NAMES, "full fine-tuning"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_is_0_at_first_and_then_that_to_the_reference(
    tiny_model: str, adapter: str, tmp_path: Path, kind: str
) -> None:
    trainer, reference = train(kind, tiny_model, adapter, tmp_path)
    curve = logged(trainer, "kl")
    assert curve[0] == pytest.approx(0, abs=1e-11)
    for step in (1, 2):
        (batch,) = rows_of(trainer, step)
        mask = batch["completion_mask"].bool()
        with torch.no_grad():
            ref = token_logprobs(reference, batch)[0]
            with weights_of(trainer, step) as model:
                lp = token_logprobs(model, batch)[0]
        torch.testing.assert_close(batch["ref_per_token_logps"][mask], ref[mask], rtol=1e-4, atol=1e-5)
        kl = (torch.exp(ref - lp) - 1 - (ref - lp))[mask].mean().item()
        assert kl > 1e-3
        assert curve[step] == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_pulls_towards_the_reference(tiny_model: str, adapter: str, tmp_path: Path, kind: str) -> None:
    trainer, reference = train(kind, tiny_model, adapter, tmp_path, loss_fn={"kl_output_clamp_value": None})
    (batch,) = rows_of(trainer, 2)
    mask = batch["completion_mask"]
    with torch.no_grad():
        ref = token_logprobs(reference, batch)[0]

    def loss(model: Any) -> Tensor:
        lp = token_logprobs(model, batch)[0]
        kl = torch.exp(lp - lp.detach()) * (torch.exp(ref - lp) - 1 - (ref - lp))
        return (on_policy_loss(batch, model) + BETA * (kl * mask).sum()) / mask.sum()

    check_gradient(trainer, loss, step=2, tolerance=1e-4)


@pytest.mark.parametrize("kind", NAMES)
def test_only_the_weights_of_the_adapter_change(tiny_model: str, adapter: str, tmp_path: Path, kind: str) -> None:
    trainer, _ = train(kind, tiny_model, adapter, tmp_path)
    after = dict(trainer.model.named_parameters())
    changed = {name for name, weight in trainer.before.items() if not torch.equal(weight, after[name])}
    assert changed == {name for name in after if f".{NAMES[kind]}." in name}
    assert {name for name, weight in after.items() if weight.requires_grad} == changed


@pytest.mark.parametrize("kind", CONTINUED)
def test_the_reference_of_a_continued_adapter_is_a_frozen_copy(
    tiny_model: str, adapter: str, tmp_path: Path, kind: str
) -> None:
    trainer, _ = train(kind, tiny_model, adapter, tmp_path)
    after = dict(trainer.model.named_parameters())
    copies = [name for name in after if ".ref." in name]
    assert len(copies) == 2 * 2 * 3  # A and B, two layers, three modules
    for name in copies:
        assert torch.equal(after[name], trainer.before[name.replace(".ref.", f".{NAMES[kind]}.")])
        assert not after[name].requires_grad
    assert trainer.ref_model is None
    assert trainer.model.active_adapter == NAMES[kind]


def test_a_new_adapter_needs_no_second_model(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    trainer, _ = train("new adapter", tiny_model, adapter, tmp_path)
    assert trainer.ref_model is None
    assert not [name for name, _ in trainer.model.named_parameters() if ".ref." in name]


def test_the_second_model_of_full_fine_tuning_stays_as_it_was(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    trainer, reference = train("full fine-tuning", tiny_model, adapter, tmp_path)
    on_disk = dict(reference.named_parameters())
    for name, weight in trainer.ref_model.named_parameters():
        assert torch.equal(weight, on_disk[name])
    assert not torch.equal(trainer.model.lm_head.weight, on_disk["lm_head.weight"])


def test_without_a_kl_there_is_no_reference(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    trainer, _ = train("full fine-tuning", tiny_model, adapter, tmp_path, beta=0.0)
    assert trainer.ref_model is None
    assert not logged(trainer, "kl")


def test_a_reference_that_follows_the_policy(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    # Copied after every step: the policy is never away from its reference.
    following = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer, _ = train("full fine-tuning", tiny_model, adapter, tmp_path, **following)
    assert logged(trainer, "kl") == pytest.approx([0, 0, 0], abs=1e-11)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("beta", [0.0, BETA])
def test_a_saved_adapter_loads_with_plain_peft(
    tiny_model: str, adapter: str, tmp_path: Path, kind: str, beta: float
) -> None:
    trainer, reference = train(kind, tiny_model, adapter, tmp_path, beta=beta)
    trainer.save_model(str(tmp_path / "saved"))
    folder = tmp_path / "saved" / ("" if NAMES[kind] == "default" else NAMES[kind])
    saved = peft.PeftModel.from_pretrained(base(tiny_model), folder).eval()
    assert not (tmp_path / "saved" / "ref").exists()
    ids = torch.tensor([[5, 15, 6, 17, 20, 21, 22]])
    with torch.no_grad():
        logits = saved(ids).logits
        torch.testing.assert_close(logits, trainer.model(ids).logits, rtol=1e-5, atol=1e-5)
        assert (logits - reference(ids).logits).abs().max() > 0.1  # it has learned something


def test_a_saved_model_loads_with_plain_transformers(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    trainer, reference = train("full fine-tuning", tiny_model, adapter, tmp_path)
    trainer.save_model(str(tmp_path / "saved"))
    ids = torch.tensor([[5, 15, 6, 17, 20, 21, 22]])
    with torch.no_grad():
        logits = base(str(tmp_path / "saved"))(ids).logits
        torch.testing.assert_close(logits, trainer.model(ids).logits, rtol=1e-5, atol=1e-5)
        assert (logits - reference(ids).logits).abs().max() > 0.1


def test_a_new_adapter_with_the_kl_in_the_reward(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    plain = {"name": "grpo", "use_leave_one_out_baseline": False, "normalize_rewards": False}
    trainer, reference = train(
        "new adapter", tiny_model, adapter, tmp_path, loss_fn={"use_kl_in_reward": True}, adv_estimator=plain
    )
    scored = trainer.scored[2]
    mask = scored["completion_mask"]
    with torch.no_grad():
        ref = token_logprobs(reference, scored)[0]
        with weights_of(trainer, 2) as model:
            lp = token_logprobs(model, scored)[0]
    kl = ((torch.exp(ref - lp) - 1 - (ref - lp)).clamp(max=10) * mask).sum(1)
    assert kl.std() > 1e-3
    rewards = scored["reward/by_completion"] - BETA * kl
    expected = rewards - rewards.view(2, 4).mean(1).repeat_interleave(4)
    torch.testing.assert_close(scored["advantages"], expected, rtol=1e-4, atol=1e-4)


VARIANTS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "the whole head": {"modules_to_save": ["lm_head"]},
    "the whole embedding": {"modules_to_save": ["embed_tokens"]},
    "LoRA of the embedding": {"target_modules": ["embed_tokens", "q_proj"]},  # its weights are named otherwise
    # These take their part out of the base.
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("continued", [False, True], ids=["new", "continued"])
def test_the_reference_is_the_policy_as_it_starts(
    tiny_model: str, tmp_path: Path, variant: str, continued: bool
) -> None:
    config = peft.LoraConfig(**(ADAPTER | VARIANTS[variant]))
    model, extra, reference = tiny_model, {"peft_config": config}, base(tiny_model)
    if continued:
        model, extra = perturbed(peft.get_peft_model(base(tiny_model), config)), {}
        reference = copy.deepcopy(model)
    args = {"max_steps": 3, "beta": BETA, "learning_rate": 0.02}
    trainer = trained(model, tmp_path, by_completion, trainer=extra, **args)
    kl = logged(trainer, "kl")
    assert kl[0] == 0
    assert kl[2] > 1e-3
    for scored in (trainer.scored[0], trainer.scored[2]):
        mask = scored["completion_mask"].bool()
        with torch.no_grad():
            ref = token_logprobs(reference.eval(), scored)[0]
        torch.testing.assert_close(scored["ref_per_token_logps"][mask], ref[mask], rtol=1e-4, atol=1e-4)


def test_the_reference_is_the_adapter_that_trains_and_not_another(
    tiny_model: str, adapter: str, tmp_path: Path
) -> None:
    model = loaded(tiny_model, adapter, "default")
    model.add_adapter("policy", peft.LoraConfig(**(ADAPTER | {"r": 2})))
    model.set_adapter("policy")
    trainer = trained(perturbed(model), tmp_path, by_completion, beta=BETA, max_steps=2, learning_rate=0.02)
    kl = logged(trainer, "kl")
    assert kl[0] == 0
    assert kl[1] > 1e-3
    assert trainer.model.peft_config["ref"].r == 2


def test_the_reference_has_no_dropout(tiny_model: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(**(ADAPTER | {"lora_dropout": 0.5}))
    model = perturbed(peft.get_peft_model(base(tiny_model), config))
    reference = copy.deepcopy(model).eval()
    trainer = trained(model, tmp_path, by_completion, beta=BETA, disable_dropout=False)
    (scored,) = trainer.scored
    with torch.no_grad():
        ref = token_logprobs(reference, scored)[0]
    mask = scored["completion_mask"].bool()
    torch.testing.assert_close(scored["ref_per_token_logps"][mask], ref[mask], rtol=1e-4, atol=1e-5)


def test_the_adapter_that_trains_cannot_have_the_name_of_its_reference(
    tiny_model: str, adapter: str, tmp_path: Path
) -> None:
    model = loaded(tiny_model, adapter, "ref")
    with pytest.raises(ValueError, match="adapter named 'ref', which is what the frozen copy .* under another name"):
        make_trainer(model, tmp_path, by_completion, beta=BETA)


def test_an_adapter_has_no_reference_that_follows(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    model = loaded(tiny_model, adapter, "default")
    with pytest.raises(NotImplementedError, match="`sync_ref_model=True` while using a PEFT model"):
        make_trainer(model, tmp_path, by_completion, beta=BETA, sync_ref_model=True)

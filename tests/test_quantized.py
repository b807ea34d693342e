"""An adapter on a base in 4 bits (QLoRA); bitsandbytes computes it on a CPU too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ADAPTER, perturbed, save_tiny_model
from tiny_env import by_completion, logged, make_trainer, quiet, rows_of, token_logprobs, weights_of
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
peft = pytest.importorskip("peft")

pytestmark = [quiet, pytest.mark.slow]
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64, hidden_size=64)


def base(tiny_model: str) -> Any:
    # In training mode: for inference on a CPU, bitsandbytes may compute in bf16.
    quantized = BitsAndBytesConfig(**FOUR_BITS)
    return AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantized).train()


def learned(tiny_model: str) -> Any:
    torch.manual_seed(0)
    return perturbed(peft.get_peft_model(base(tiny_model), peft.LoraConfig(**ADAPTER)))


def in_bf16(model: Any) -> Any:
    """The adapter as TRL trains it on a quantised base."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    return model


@pytest.mark.parametrize("continued", [False, True], ids=["new", "continued"])
def test_an_adapter_trains_on_four_bits(tiny_model: str, tmp_path: Path, continued: bool) -> None:
    model: Any = tiny_model
    extra: dict[str, Any] = {
        "peft_config": peft.LoraConfig(**ADAPTER),
        "quantization_config": BitsAndBytesConfig(**FOUR_BITS),
    }
    reference = base(tiny_model)
    if continued:
        model, extra, reference = learned(tiny_model), {}, in_bf16(learned(tiny_model))
    args = {"beta": 0.1, "learning_rate": 0.01, "max_steps": 3}
    trainer = make_trainer(model, tmp_path, by_completion, trainer=extra, **args)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    # In bf16 a small step may be lost; the other half starts at zero, or near it.
    assert {name for name in after if ".lora_B.default." in name} <= changed
    assert changed <= {name for name in after if ".default." in name}
    assert sum(weight.dtype == torch.uint8 for weight in after.values()) == 2 * 7  # of two layers

    kl = logged(trainer, "kl")
    assert kl[0] == 0
    (batch,) = rows_of(trainer, 2)
    mask = batch["completion_mask"].bool()
    with torch.no_grad():
        ref = token_logprobs(reference, batch)[0]
        with weights_of(trainer, 2) as policy:
            lp = token_logprobs(policy, batch)[0]
    by_hand = (torch.exp(ref - lp) - 1 - (ref - lp))[mask].mean().item()
    assert by_hand > 0.1
    assert kl[2] == pytest.approx(by_hand, rel=1e-3)

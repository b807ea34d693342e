"""Mixed precision in fp16, that of GPUs without bf16: what the loss computes in, and what becomes of an overflow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_model
from tiny_env import GivenRollouts, by_completion, logged, make_trainer, quiet

pytestmark = [quiet, pytest.mark.slow]
FIELDS = {"beta": 0.1, "learning_rate": 1e-3, "max_steps": 3}
FITS, OVERFLOWS = 2.0**8, 2.0**16  # factors of the loss; the second is where torch starts


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=64)


class AsOnAGpu(GivenRollouts):
    """With the autocast and the scaled loss that Accelerate leaves out on a CPU."""

    scale = FITS

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        # The first overflow brings the factor down to the one that fits.
        down = FITS / OVERFLOWS
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, backoff_factor=down)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        logprobs, entropies, aux_loss = super()._forward(*args, **kwargs)
        self.__dict__.setdefault("types", set()).update((logprobs.dtype, entropies.dtype))
        return logprobs, entropies, aux_loss


class StartsTooHigh(AsOnAGpu):
    scale = OVERFLOWS


def in_fp16(tiny_model: str, folder: Path, mixin: type = AsOnAGpu, **args: Any) -> Any:
    return make_trainer(tiny_model, folder, by_completion, mixin=mixin, fp16=True, **(FIELDS | args))


def changed_by(trainer: Any, step: int) -> bool:
    """Whether an optimizer step, not the last, changed a weight."""
    before, after = trainer.watch.weights[step : step + 2]
    assert all(weight.isfinite().all() for weight in after.values())
    return any(not torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.parametrize("shared", ["auto", False])
def test_the_loss_is_computed_in_float32(tiny_model: str, tmp_path: Path, shared: Any) -> None:
    trainer = in_fp16(tiny_model, tmp_path, shared_prompt_forward=shared)
    layers = set()
    trainer.model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *call: layers.add(call[-1].dtype))
    trainer.train()
    exact = make_trainer(tiny_model, tmp_path, by_completion, **FIELDS)
    exact.train()
    assert layers == {torch.float16}
    assert trainer.types == {torch.float32}
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert logged(trainer, name) == pytest.approx(logged(exact, name), rel=0.01), name


def test_a_gradient_that_overflows_is_no_step(tiny_model: str, tmp_path: Path) -> None:
    trainer = in_fp16(tiny_model, tmp_path, mixin=StartsTooHigh)
    trainer.train()
    assert not math.isfinite(logged(trainer, "grad_norm")[0])
    assert not changed_by(trainer, 0)
    assert changed_by(trainer, 1)
    assert trainer.accelerator.scaler.get_scale() == FITS


def test_a_loss_that_overflows_is_no_step(tiny_model: str, tmp_path: Path) -> None:
    trainer = in_fp16(tiny_model, tmp_path, max_steps=4, logging_nan_inf_filter=False)

    def overflow(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        trains = torch.is_grad_enabled() and trainer.state.global_step == 1
        return output * torch.tensor(1e5 if trains else 1, dtype=output.dtype)

    trainer.model.model.layers[1].mlp.down_proj.register_forward_hook(overflow)
    trainer.train()
    assert math.isnan(logged(trainer, "loss")[1])
    assert not changed_by(trainer, 1)
    assert changed_by(trainer, 2)

"""A vLLM engine beside the trainer, in one process on the CPU: `make test-vllm`, in an environment of its own.

In float32 the two agree to rounding, so that weights which are one step old show. In bfloat16 they do not, and the
corrections meet a mismatch that nobody made up.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_model
from tiny_env import (
    CENTRED,
    G,
    Remembers,
    by_completion,
    check_gradient,
    flat,
    geometric_mean,
    inside,
    logged,
    on_policy_loss,
    quiet,
    rows_of,
    token_logprobs,
    trainable,
    trained,
    truncation,
    weights_of,
)
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

vllm = pytest.importorskip("vllm", reason="needs vLLM for the CPU: make test-vllm")
if not vllm.platforms.current_platform.is_cpu():
    pytest.skip("needs vLLM for the CPU: make test-vllm", allow_module_level=True)

pytestmark = quiet
CORRECTED = {"use_importance_sampling_correction": True}
LARGE_STEPS = {"learning_rate": 2e-3}  # by far more than rounding, so that stale weights would show


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """In the place of vLLM's packed matrices, which would keep the weights that the engine was built with."""
    layer.cpu_linear = torch.nn.functional.linear


ENGINES: dict[str, Any] = {}


def engine(dtype: str, **asked_by_trl: Any) -> Any:
    """An engine for all tests: each trainer sends it its weights before the first completion."""
    if dtype not in ENGINES:
        importlib.import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm = plain_linear
        small = {"enforce_eager": True, "max_num_seqs": 64, "kv_cache_memory_bytes": 2**26}
        ENGINES[dtype] = vllm.LLM(**(asked_by_trl | small | {"dtype": dtype}))
    return ENGINES[dtype]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of 32, the smallest that vLLM's attention takes on a CPU."""
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_model(folder, vocab_size=64, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)


Train = Callable[..., Any]


@pytest.fixture
def train(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains for three steps on completions that an engine in `dtype` draws."""

    def run(dtype: str = "float32", reward: Any = by_completion, **fields: Any) -> Any:
        monkeypatch.setattr(vllm_generation, "LLM", functools.partial(engine, dtype))
        defaults = {"use_vllm": True, "max_steps": 3, "learning_rate": 3e-4}
        return trained(tiny_model, tmp_path, reward, mixin=Remembers, **(defaults | fields))

    return run


def log_weights(trainer: Any, step: int, weights: int | None = None) -> tuple[Tensor, Tensor]:
    """`prev - gen` of the rollouts of a step, 0 where masked, and their mask.

    `prev` is of the weights before that step, or before step `weights`.
    """
    (batch,) = rows_of(trainer, step)
    mask = batch["completion_mask"]
    with torch.no_grad(), weights_of(trainer, step if weights is None else weights) as model:
        prev = token_logprobs(model, batch, trainer.temperature)[0]
    return (prev - batch["sampling_per_token_logps"]) * mask, mask


def check_synced(trainer: Any) -> None:
    """The engine draws the rollouts of every step from the weights before that step, and not from older ones."""
    for step in range(trainer.args.max_steps):
        off = log_weights(trainer, step)[0].abs().amax().item()
        assert off < 1e-4, f"step {step}: the engine is off by {off:.2g} nats"
        if step:
            stale = log_weights(trainer, step, step - 1)[0].abs().amax().item()
            assert stale > 0.1, f"step {step}: stale weights would be off by {stale:.2g} nats, which shows too little"


# In float32


def test_the_engine_has_the_weights_of_every_step(train: Train) -> None:
    trainer = train(loss_fn=CORRECTED, **LARGE_STEPS, max_steps=4, temperature=0.7)
    check_synced(trainer)
    assert logged(trainer, "sampling_importance_ratio") == pytest.approx([1.0] * 4, abs=1e-4)
    assert logged(trainer, "token_mult_prob_error") == pytest.approx([1.0] * 4, abs=1e-4)


def test_an_engine_that_keeps_its_first_weights_is_found(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = vllm_generation.VLLMGeneration.sync_weights
    synced = []

    def once(self: Any) -> None:
        if not synced:
            sync(self)
            synced.append(True)

    monkeypatch.setattr(vllm_generation.VLLMGeneration, "sync_weights", once)
    trainer = train(loss_fn=CORRECTED, **LARGE_STEPS)
    with pytest.raises(AssertionError, match="step 1: the engine is off"):
        check_synced(trainer)
    assert max(logged(trainer, "token_mult_prob_error")) > 1.1, "the metric says it too"


def test_an_adapter_is_merged_into_the_weights_of_the_engine(train: Train) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = train(loss_fn=CORRECTED, **LARGE_STEPS, trainer={"peft_config": adapter}, max_steps=4)
    check_synced(trainer)


def test_dynamic_sampling_draws_from_the_engine(train: Train) -> None:
    def half_of_the_groups(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """By the prompt alone for an even first number: such a group has no signal."""
        return [
            0.0 if int(prompt[0]) % 2 == 0 else reward
            for prompt, reward in zip(prompts, by_completion(completion_ids), strict=True)
        ]

    trainer = train(reward=half_of_the_groups, loss_fn=CORRECTED, use_dynamic_sampling=True, **LARGE_STEPS)
    assert max(logged(trainer, "dynamic_sampling/rounds")) > 1
    assert all(batch["advantages"].view(-1, G).std(1).min() > 0 for batch in trainer.scored)
    check_synced(trainer)


def test_top_p_renormalises_the_log_probabilities_of_the_engine(train: Train) -> None:
    """A token's weight is the mass that top_p keeps, and the weight of a row, a product of them, goes to 0."""
    with pytest.warns(UserWarning, match=r"top_p=0.8 with an importance correction: the engine renormalises"):
        trainer = train(top_p=0.8, max_completion_length=24, max_steps=1)
    (batch,) = trainer.scored
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    mask = batch["completion_mask"]
    with torch.no_grad(), weights_of(trainer, 0) as model:
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -mask.shape[1] - 1 : -1]
        prev = token_logprobs(model, batch)[0]
    probs = logits.softmax(-1).sort(-1, descending=True).values
    kept = (probs * (probs.cumsum(-1) - probs < 0.8)).sum(-1)
    weight = ((prev - batch["sampling_per_token_logps"]) * mask).exp()
    torch.testing.assert_close(weight[mask.bool()], kept[mask.bool()], rtol=0, atol=1e-4)
    row = torch.where(mask.bool(), kept, 1).prod(1)
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([row.mean().item()], rel=1e-2)
    assert row.min() < 0.05


# In bfloat16


@pytest.mark.parametrize(
    ("kind", "low", "high", "weight"),
    [
        ("tis", 0.0, 1.01, lambda x, m: x.exp().clamp(0, 1.01)),
        ("icepop", 0.99, 1.01, lambda x, m: x.exp() * inside(x.exp(), 0.99, 1.01)),
        ("seq-mask-tis", 0.997, 1.003, lambda x, m: x.exp() * inside(geometric_mean(x, m), 0.997, 1.003)),
    ],
)
def test_truncation_of_a_real_mismatch(
    train: Train, kind: str, low: float, high: float, weight: Callable[[Tensor, Tensor], Tensor]
) -> None:
    trainer = train("bfloat16", loss_fn=CORRECTED | truncation(kind, low, high), per_device_train_batch_size=16)

    def loss(step: int) -> Callable[[Any], Tensor]:
        (batch,), (log_weight, mask) = rows_of(trainer, step), log_weights(trainer, step)
        return lambda model: on_policy_loss(batch, model, weight(log_weight, mask)) / mask.sum()

    for step in range(3):
        check_gradient(trainer, loss(step), step=step)
        log_weight, mask = log_weights(trainer, step)
        judged = geometric_mean(log_weight, mask) if kind == "seq-mask-tis" else log_weight.exp()[mask.bool()]
        share = 1 - inside(judged, low, high).mean().item()
        assert 0 < share < 1, "some are out of bounds and some are not"
        assert logged(trainer, "is_oob_ratio")[step] == pytest.approx(share)
    assert flat(trainable(trainer.model)).isfinite().all()


def test_rows_on_which_the_engine_is_far_off_do_not_train(train: Train) -> None:
    threshold = 1.01
    trainer = train(
        "bfloat16",
        loss_fn=CORRECTED,
        adv_estimator=CENTRED,
        seq_logprob_error_threshold=threshold,
        per_device_train_batch_size=32,
        max_steps=1,
    )
    (batch,) = rows_of(trainer)
    log_weight, mask = log_weights(trainer, 0)
    error = (log_weight.abs().exp() * mask).sum(1) / mask.sum(1)
    agree = error <= threshold
    assert 0 < agree.sum() < len(agree), "some rows are left out and some are not"
    assert batch["sample_mask"].tolist() == agree.tolist()
    assert not batch["advantages"][~agree].any()
    expected = {
        "seq_logprob_error/masked_rows": (~agree).sum(),
        "seq_logprob_error/before_max": error.amax(),
        "seq_logprob_error/after_max": error[agree].amax(),
        "num_valid_samples": agree.sum(),
    }
    for name, value in expected.items():
        assert logged(trainer, name) == pytest.approx([value.item()], rel=1e-5), name
    counted = mask * agree[:, None]
    check_gradient(trainer, lambda model: on_policy_loss(batch, model, log_weight.exp(), mask=counted) / counted.sum())


def test_the_kl_is_weighed_by_the_policy_over_the_engine(tiny_model: str, train: Train) -> None:
    """beta * mean_t exp(lp - gen) k3(ref - lp), where the weight carries a gradient too."""
    beta = 0.5
    knobs = CORRECTED | {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": beta}
    trainer = train("bfloat16", loss_fn=knobs)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model).eval()

    def loss(step: int) -> Callable[[Any], Tensor]:
        (batch,), (log_weight, mask) = rows_of(trainer, step), log_weights(trainer, step)
        with torch.no_grad():
            ref = token_logprobs(reference, batch)[0]

        def of(model: Any) -> Tensor:
            lp = token_logprobs(model, batch)[0]
            x = (ref - lp) * mask
            kl = ((lp - batch["sampling_per_token_logps"]) * mask).exp() * (x.exp() - 1 - x)
            assert x.abs().amax() < 20, "the input clamp does not bite"
            assert kl.amax() < 10, "the output clamp does not bite"
            return (on_policy_loss(batch, model, log_weight.exp()) + beta * (kl * mask).sum()) / mask.sum()

        return of

    for step in range(3):
        check_gradient(trainer, loss(step), step=step)
    assert logged(trainer, "kl")[0] < 1e-6 < logged(trainer, "kl")[-1]
    assert flat(trainable(trainer.model)).isfinite().all()

"""The estimators and the loss alone, against plain transcriptions of their formulas.

    python benchmarks/kernels.py --json benchmarks/kernels.json

The yardstick of an estimator is a loop over the prompts, told apart by their tokens, as NeMo-RL has it; that of the
loss is the textbook form that reads each metric off the device as it goes. Both are checked to give our values, and
they take turns with ours on one thread; what is compared is processor time, which other work on the machine disturbs
least.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import median, print_table, write
from torch import Tensor

from hf_grpo_ext import AdvEstimatorConfig, ClippedPGLossConfig, ClippedPGLossFn, get_advantage_estimator

ROLLOUTS, GROUP = 16384, 16
ROWS, TOKENS = 32, 2048


def loop_group_advantage(rewards: Tensor, prompts: Tensor) -> Tensor:
    """Leave-one-out advantage, normalised, one prompt after the other."""
    advantages = torch.zeros_like(rewards)
    for prompt in torch.unique(prompts, dim=0):
        rows = torch.arange(len(rewards))[(prompts == prompt).all(1)]
        values = rewards[rows]
        others = 1 - torch.eye(len(values))
        count = len(values) - 1
        baseline = others @ values / count
        deviation = (values[None, :] - baseline[:, None]) * others
        std = (deviation.square().sum(1) / (count - 1)).sqrt()
        advantage = values - baseline
        if bool((std > 0).any()):
            divided = advantage / (std + 1e-6)
            advantage = torch.where(std > 1e-4, divided, advantage)  # the two passes leave no residue above it
        advantages[rows] = advantage
    return advantages


def loop_grpo(rewards: dict[str, Tensor], prompts: Tensor, mask: Tensor) -> Tensor:
    return loop_group_advantage(sum(rewards.values()), prompts)


def loop_gdpo(rewards: dict[str, Tensor], prompts: Tensor, mask: Tensor) -> Tensor:
    total = sum(loop_group_advantage(column, prompts) for column in rewards.values())
    return (total - total.mean()) / total.std()


def loop_reinforce_plus_plus(rewards: dict[str, Tensor], prompts: Tensor, mask: Tensor) -> Tensor:
    values = sum(rewards.values())
    centred = torch.zeros_like(values)
    for prompt in torch.unique(prompts, dim=0):
        rows = torch.arange(len(values))[(prompts == prompt).all(1)]
        centred[rows] = values[rows] - values[rows].mean()
    tokens = centred[:, None].expand(mask.shape)
    mean = (tokens * mask).sum() / mask.sum()
    variance = ((tokens - mean).square() * mask).sum() / mask.sum()
    return (tokens - mean) * variance.clamp(min=1e-8).rsqrt()


def plain_loss(logprobs: Tensor, batch: dict[str, Tensor], beta: float) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped loss with a k3 KL term at the token level, each metric read as it is computed."""
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    toks = mask.sum()

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum() / toks

    prev, generation = batch["prev_logprobs"], batch["generation_logprobs"]
    ratio = torch.exp(logprobs - prev)
    clipped = ratio.clamp(0.8, 1.2)
    weights = torch.exp(prev - generation).clamp(0, 2)
    x = (batch["reference_policy_logprobs"] - logprobs).clamp(-20, 20)
    kl = (torch.exp(logprobs - logprobs.detach()) * (torch.exp(x) - 1 - x)).clamp(-10, 10)
    advantages = batch["advantages"]
    loss = mean(weights * torch.maximum(-advantages * ratio, -advantages * clipped)) + beta * mean(kl)
    with torch.no_grad():
        valid = mask.bool()
        log_mixture = torch.log(0.5 * torch.exp(prev) + 0.5 * torch.exp(generation))
        js = [torch.exp(y) - 1 - y for y in (log_mixture - prev, log_mixture - generation)]
        metrics = {
            "probs_ratio": mean(ratio).item(),
            "probs_ratio_min": ratio[valid].min().item(),
            "probs_ratio_max": ratio[valid].max().item(),
            "probs_ratio_clamped": mean(clipped).item(),
            "probs_ratio_clamped_min": clipped[valid].min().item(),
            "probs_ratio_clamped_max": clipped[valid].max().item(),
            "clip_fraction_low": mean(((ratio < 0.8) & (advantages < 0)).float()).item(),
            "clip_fraction_high": mean(((ratio > 1.2) & (advantages > 0)).float()).item(),
            "kl_penalty": mean(kl).item(),
            "kl": mean(kl).item(),
            "token_mult_prob_error": mean(torch.exp((generation - prev).abs())).item(),
            "gen_kl_error": mean(torch.exp(prev - generation) - 1 - (prev - generation)).item(),
            "policy_kl_error": mean(torch.exp(generation - prev) - 1 - (generation - prev)).item(),
            "js_divergence_error": mean(0.5 * (js[0] + js[1])).item(),
            "sampling_importance_ratio": mean(weights).item(),
            "approx_entropy": -mean(torch.exp(logprobs - generation) * logprobs).item(),
            "is_oob_ratio": mean((torch.exp(prev - generation) > 2).float()).item(),
            "num_valid_samples": batch["sample_mask"].sum().item(),
        }
    return loss, metrics


def take_turns(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds of each."""
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, spent in zip((first, second), times, strict=True):
            begin = time.process_time()
            function()
            spent.append(time.process_time() - begin)
    return median(times[0]), median(times[1])


def estimator_row(name: str, loop: Callable[..., Tensor], repeats: int, prompt_tokens: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    components = 2
    rewards = {f"r{k}": torch.randint(0, 3, (ROLLOUTS,), generator=random).float() for k in range(components)}
    group_ids = torch.arange(ROLLOUTS) // GROUP
    prompts = torch.randint(0, 50000, (ROLLOUTS // GROUP, prompt_tokens), generator=random)[group_ids]
    mask = torch.ones(ROLLOUTS, 8 if name == "reinforce_plus_plus" else 1)
    estimator = get_advantage_estimator(AdvEstimatorConfig(name=name))

    def ours() -> Tensor:
        return estimator.compute_advantage(group_ids, rewards, mask)

    def theirs() -> Tensor:
        return loop(rewards, prompts, mask)

    torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-4)
    slow, fast = take_turns(theirs, ours, repeats)
    return {
        "work": f"{name}_{ROLLOUTS}",
        "time_ratio": slow / fast,
        "needed": 100,
        "loop_ms": 1e3 * slow,
        "ours_ms": 1e3 * fast,
    }


def loss_row(repeats: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, TOKENS, generator=random)

    prev = -normal(1.0).abs() - 0.1
    lengths = torch.randint(TOKENS // 4, TOKENS + 1, (ROWS, 1), generator=random)
    batch = {
        "prev_logprobs": prev,
        "generation_logprobs": prev + normal(0.05),
        "reference_policy_logprobs": prev + normal(0.1),
        "advantages": torch.randn(ROWS, 1, generator=random),
        "token_mask": (torch.arange(TOKENS) < lengths).float(),
        "sample_mask": torch.ones(ROWS),
    }
    logprobs = (prev + normal(0.1)).requires_grad_()
    toks = (batch["token_mask"]).sum()
    loss_fn = ClippedPGLossFn(
        ClippedPGLossConfig(
            reference_policy_kl_penalty=0.1,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=2.0,
        )
    )

    def backward(loss: Tensor) -> Tensor:
        logprobs.grad = None
        loss.backward()
        return logprobs.grad

    def ours() -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = loss_fn(logprobs, batch, global_valid_toks=toks, global_valid_seqs=ROWS)
        return backward(loss), metrics

    def theirs() -> tuple[Tensor, dict[str, float]]:
        loss, metrics = plain_loss(logprobs, batch, 0.1)
        return backward(loss), metrics

    (grad, metrics), (expected, values) = ours(), theirs()
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-9)
    for name, value in values.items():
        torch.testing.assert_close(metrics[name].item(), value, rtol=1e-3, atol=1e-5)
    slow, fast = take_turns(theirs, ours, repeats)
    return {
        "work": f"loss_{ROWS}x{TOKENS}",
        "time_ratio": slow / fast,
        "needed": 2,
        "loop_ms": 1e3 * slow,
        "ours_ms": 1e3 * fast,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=8, help="by which the loop tells prompts apart")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loops = {"grpo": loop_grpo, "gdpo": loop_gdpo, "reinforce_plus_plus": loop_reinforce_plus_plus}
    rows = [estimator_row(name, loop, args.repeats, args.prompt_tokens) for name, loop in loops.items()]
    rows.append(loss_row(2 * args.repeats))
    print_table(rows, ["work", "time_ratio", "needed", "loop_ms", "ours_ms"])
    write(args.json, rows, command=" ".join(["python", *sys.argv]))


if __name__ == "__main__":
    main()

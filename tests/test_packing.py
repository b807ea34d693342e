"""A batch whose prompts stand there once gives what the padded batch gives: log-probabilities, entropies, gradient."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BASE, seeds
from tiny_env import difference, gradient, token_logprobs
from tiny_vlm import tiny_llava
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl.trainer.utils import add_fused_lm_head

from hf_grpo_ext.packing import PackedRows, attend_in_blocks, attend_in_segments, pack_rows, prompt_ids_of
from hf_grpo_ext.shared_prompt import (
    draws_dropout,
    packed_log_probs,
    prepare_model,
    same_in_both_layouts,
    why_not_packed,
)

VOCAB = 40
PAD = 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}

Row = tuple[list[int], list[int]]  # a prompt and its completion


def sharp(model: PreTrainedModel, *, temperature: float = 1.0) -> Any:
    """The model in float64 with TRL's head, its policy far from flat, ready for packed rows."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(20 if "lm_head" in name else 5 if weight.dim() > 1 else 1)
    model = model.double().eval()
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    prepare_model(model)
    return model


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | overrides)))


def tiny_qwen2(**overrides: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**(SIZES | overrides)))


@pytest.fixture(scope="module")
def llama() -> Any:
    return sharp(tiny_llama())


def padded(rows: list[Row], *, left: int = 0, right: int = 0) -> dict[str, Tensor]:
    """The rectangle that TRL makes of rows, with some columns of padding more on either side."""
    width, length = max(len(p) for p, _ in rows) + left, max(len(c) for _, c in rows) + right
    columns: dict[str, list[list[int]]] = {}
    for prompt, completion in rows:
        before, after = width - len(prompt), length - len(completion)
        for name, values in (
            ("prompt_ids", [PAD] * before + prompt),
            ("prompt_mask", [0] * before + [1] * len(prompt)),
            ("completion_ids", completion + [PAD] * after),
            ("completion_mask", [1] * len(completion) + [0] * after),
        ):
            columns.setdefault(name, []).append(values)
    return {name: torch.tensor(values) for name, values in columns.items()}


def pack(batch: dict[str, Tensor]) -> PackedRows | None:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return pack_rows(ids, mask, batch["completion_ids"].shape[1])


def packed_forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    packed = pack(batch)
    assert packed is not None
    logps, entropies = packed_log_probs(model, packed)
    assert entropies is not None
    return logps.double(), entropies.double()  # TRL's head answers in float32


def padded_forward(model: nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The plain softmax of the logits, 0 where masked as in TRL's head."""
    masked = batch["completion_mask"] == 0
    logps, entropies = token_logprobs(model, batch, temperature)
    return logps.masked_fill(masked, 0), entropies.masked_fill(masked, 0)


def weighted(values: tuple[Tensor, Tensor]) -> Tensor:
    """A scalar to which every token adds its own share, so that no error hides in a sum."""
    logps, entropies = values
    weights = torch.linspace(-1, 1.3, logps.numel(), dtype=logps.dtype).view_as(logps)
    return (weights * logps).sum() + (weights.flip(0) * entropies).sum()


def check_same(model: nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> None:
    """Packed and padded agree, up to the float32 in which the norms and the rotary embedding are computed."""
    ours, plain = packed_forward(model, batch), padded_forward(model, batch, temperature)
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert difference(gradient(weighted(ours), model), gradient(weighted(plain), model)) < 1e-5


@st.composite
def ragged_rows(draw: st.DrawFn) -> list[Row]:
    """Rows of one to three prompts, in mixed order, at least one of them with a completion."""
    rng = torch.Generator().manual_seed(draw(seeds))

    def words(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=rng).tolist()

    prompts = [words(n) for n in draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))]
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
    return [(draw(st.sampled_from(prompts)), words(n)) for n in lengths]


# The layout


ROWS: list[Row] = [([11, 12, 13], [1, 2]), ([21, 22], [4, 5, 6]), ([11, 12, 13], [3]), ([31], [7, 8])]


def test_prompts_stand_once_and_each_completion_behind_the_last_token_of_its_prompt() -> None:
    packed = pack(padded(ROWS, left=1))
    assert packed is not None
    ids, positions = packed.input_ids[0].tolist(), packed.position_ids[0].tolist()
    start = packed.scored.min().item()
    assert sorted(ids[:start]) == [11, 12, 21]  # the prompt of one token has no other
    assert dict(zip(ids[:start], positions, strict=False)) == {11: 0, 12: 1, 21: 0}
    assert ids[start:] == [13, 1, 22, 4, 5, 13, 31, 7]
    assert positions[start:] == [2, 3, 1, 2, 3, 2, 0, 1]
    assert packed.scored.tolist() == list(range(start, len(ids)))
    assert packed.labels.tolist() == [[1, 2, 4, 5, 6, 3, 7, 8]]
    assert packed.targets.tolist() == [0, 1, 3, 4, 5, 6, 9, 10]
    assert packed.shape == (4, 3)
    assert packed.input_ids.shape == packed.position_ids.shape == (1, len(ids))


@settings(BASE, max_examples=150)
@given(ragged_rows(), st.integers(0, 2), st.integers(0, 2))
def test_no_position_is_padding_and_each_scored_one_predicts_its_own_token(
    rows: list[Row], left: int, right: int
) -> None:
    batch = padded(rows, left=left, right=right)
    packed = pack(batch)
    assert packed is not None
    prompts = {tuple(prompt) for prompt, _ in rows}
    tokens = sum(len(completion) for _, completion in rows)
    assert packed.input_ids.numel() == sum(len(prompt) - 1 for prompt in prompts) + tokens
    assert len(packed.scored) == len(packed.targets) == packed.labels.numel() == tokens
    width = batch["completion_ids"].shape[1]
    for position, label, target in zip(
        packed.scored.tolist(), packed.labels[0].tolist(), packed.targets.tolist(), strict=True
    ):
        (prompt, completion), token = rows[target // width], target % width
        assert label == completion[token]
        place = len(prompt) + token - 1
        assert packed.position_ids[0, position] == place
        assert packed.input_ids[0, position] == [*prompt, *completion][place]
    assert len(set(packed.targets.tolist())) == tokens


@settings(BASE, max_examples=100)
@given(ragged_rows())
def test_a_position_attends_to_its_own_row_up_to_itself(rows: list[Row]) -> None:
    packed = pack(padded(rows))
    assert packed is not None
    ids, positions = packed.input_ids[0].tolist(), packed.position_ids[0].tolist()
    seen: dict[int, list[int]] = {}
    flat = 0
    inverse = {place: position for position, place in enumerate(packed.places.tolist())}
    for block in packed.blocks:
        n, length = block.queries.shape
        mask = torch.ones(length, length, dtype=torch.bool).tril() if block.mask is None else block.mask
        mask = mask.expand(n, 1, length, block.keys.shape[1])
        for row in range(n):
            for query in range(length):
                if flat in inverse:  # the others are padding
                    assert block.queries[row, query] == inverse[flat]
                    seen[inverse[flat]] = block.keys[row][mask[row, 0, query]].tolist()
                flat += 1
    assert seen.keys() == set(range(len(ids)))
    assert {(*(ids[k] for k in keys),) for keys in seen.values()} == {
        (*[*prompt, *completion][: place + 1],)
        for prompt, completion in rows
        for place in range(len(prompt) + len(completion) - 1)
        if completion or place < len(prompt) - 1
    }
    for position, keys in seen.items():
        assert sorted(positions[k] for k in keys) == list(range(positions[position] + 1))


def test_unpacking_is_0_where_masked() -> None:
    packed = pack(padded([([5, 6], [1]), ([5, 6], []), ([7], [2, 3])], right=1))
    assert packed is not None
    assert packed.unpack(torch.tensor([[4.0, 5.0, 6.0]])).tolist() == [[4, 0, 0], [0, 0, 0], [5, 6, 0]]


def test_unpacking_carries_the_gradient() -> None:
    packed = pack(padded(ROWS))
    assert packed is not None
    values = torch.zeros(1, 8, requires_grad=True)
    (packed.unpack(values) * torch.arange(12.0).view(4, 3)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [packed.targets.tolist()]


@pytest.mark.parametrize(
    ("prompt_mask", "completion_mask"),
    [
        ([[1, 1], [1, 1]], [[0, 0], [0, 0]]),  # no completion has a token
        ([[1, 1], [0, 0]], [[1, 1], [1, 0]]),  # a prompt has none
    ],
)
def test_there_may_be_nothing_to_pack(prompt_mask: list[list[int]], completion_mask: list[list[int]]) -> None:
    ids = torch.arange(1, 9).view(2, 4)
    mask = torch.cat([torch.tensor(prompt_mask), torch.tensor(completion_mask)], dim=1)
    assert pack_rows(ids, mask, 2) is None
    assert pack_rows(ids, torch.ones_like(mask), 2) is not None


def test_prompts_are_equal_where_their_tokens_are_whatever_lies_under_the_padding() -> None:
    prompts = torch.tensor([[9, 5, 6], [8, 5, 6], [0, 5, 7], [5, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1]])
    number = prompt_ids_of(prompts, mask).tolist()
    assert number[0] == number[1]
    assert len(set(number)) == 3


# The forward


@settings(BASE, max_examples=30)
@given(rows=ragged_rows(), left=st.integers(0, 2), right=st.integers(0, 2))
def test_packed_and_padded_rows_have_the_same_gradient(llama: Any, rows: list[Row], left: int, right: int) -> None:
    check_same(llama, padded(rows, left=left, right=right))


SHAPES: dict[str, list[Row]] = {
    "several rows a prompt": [([5, 6, 7], [8, 9]), ([5, 6, 7], [9, 8, 7, 6]), ([5, 6, 7], [8])],
    "all prompts different": [([5, 6, 7], [8, 9]), ([6, 7], [9, 8, 7, 6]), ([7], [8])],
    "prompts of one token": [([5], [8, 9]), ([5], [9]), ([6], [7, 7, 7])],
    "one prompt starts as the other": [([5, 6], [7, 8]), ([5, 6, 7], [8])],
    "an empty completion": [([5, 6], [7, 8]), ([5, 6], []), ([7, 8], [])],
    "one row": [([5, 6, 7], [8, 9])],
    "one token": [([5], [6])],
    "the same row twice": [([5, 6], [7, 8]), ([5, 6], [7, 8])],
    "a token that is the padding's": [([PAD, 6], [7, PAD, 8]), ([6], [7])],
}


def tiny_experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, experts_implementation="eager"))


MODELS: dict[str, Any] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "a mixture of experts": tiny_experts,
    "a head of keys for each of queries": lambda: tiny_llama(num_key_value_heads=4),
    "one head of keys": lambda: tiny_llama(num_key_value_heads=1),
    "tied embeddings": lambda: tiny_llama(tie_word_embeddings=True),
    "rope linear": lambda: tiny_llama(rope_parameters=LINEAR),
    "rope llama3": lambda: tiny_llama(rope_parameters=LLAMA3),
    "rope yarn": lambda: tiny_llama(rope_parameters=YARN),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_batch(llama: Any, shape: str) -> None:
    check_same(llama, padded(SHAPES[shape], left=1, right=1))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_that_can(model: str) -> None:
    built = MODELS[model]()
    assert why_not_packed(built) is None
    check_same(sharp(built), padded([*SHAPES["several rows a prompt"], *SHAPES["all prompts different"]]))


def test_the_temperature_of_the_head_holds() -> None:
    model = sharp(tiny_llama(), temperature=0.7)
    check_same(model, padded(SHAPES["several rows a prompt"]), temperature=0.7)


def test_prompts_that_are_padded_on_the_right_as_well_are_computed_apart(llama: Any) -> None:
    batch = padded([([5, 6, 7], [8, 9]), ([5, 6, 7], [9, 8, 7])], left=1)
    for name in ("prompt_ids", "prompt_mask"):
        batch[name] = torch.stack([batch[name][0], batch[name][1].roll(-1)])
    packed = pack(batch)
    assert packed is not None
    assert packed.input_ids.numel() == 2 + 2 + 5
    ours = packed_forward(llama, batch)[0]
    alone = padded_forward(llama, padded([([5, 6, 7], [8, 9])]))[0]
    torch.testing.assert_close(ours[0, :2], alone[0], rtol=0, atol=2e-5)
    plain = padded_forward(llama, batch)[0]
    # The first token behind the padding is predicted from the padding in the one layout, from the prompt in the other.
    torch.testing.assert_close(ours[1, 1:], plain[1, 1:], rtol=0, atol=2e-5)


def test_a_hole_in_the_completion_is_not_read(llama: Any) -> None:
    batch = padded([([5, 6], [7, 8, 9, 10, 11]), ([5, 6], [9, 8])])
    batch["completion_mask"][0, 1:3] = 0
    ours, plain = packed_forward(llama, batch)[0], padded_forward(llama, batch)[0]
    assert ours[0, 1:3].tolist() == [0, 0]
    # The token behind the hole is predicted from the last one before it, not from the hole; the others as ever.
    others = torch.tensor([True, True, True, False, True])
    torch.testing.assert_close(ours[:, others], plain[:, others], rtol=0, atol=2e-5)
    batch["completion_ids"][0, 1:3] = torch.tensor([20, 21])
    torch.testing.assert_close(packed_forward(llama, batch)[0], ours, rtol=0, atol=0)


def test_completions_of_one_prompt_do_not_see_each_other(llama: Any) -> None:
    rows: list[Row] = [([5, 6], [7, 8, 9]), ([5, 6], [9, 8, 7])]
    before = packed_forward(llama, padded(rows))[0]
    after = packed_forward(llama, padded([rows[0], ([5, 6], [1, 2, 3])]))[0]
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=2e-5)
    assert (after[1] - before[1]).abs().max() > 0.1


def test_a_head_without_entropies_gives_none() -> None:
    model = tiny_llama()
    add_fused_lm_head(model)
    prepare_model(model)
    packed = pack(padded(ROWS))
    assert packed is not None
    logps, entropies = packed_log_probs(model, packed)
    assert logps.shape == (4, 3)
    assert entropies is None


def test_a_prepared_model_computes_padded_rows_as_before() -> None:
    model = tiny_llama().eval()
    batch = padded(ROWS)
    before = token_logprobs(model, batch)[0]
    prepare_model(model)
    attention = AttentionInterface._global_mapping["sdpa"]
    prepare_model(model)  # twice is once
    assert AttentionInterface._global_mapping["sdpa"] is attention
    assert torch.equal(token_logprobs(model, batch)[0], before)
    assert len(model.base_model._forward_hooks) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_keeps_the_gradient(reentrant: bool) -> None:
    model, batch = sharp(tiny_llama()).train(), padded(SHAPES["several rows a prompt"], left=1)
    expected = gradient(weighted(packed_forward(model, batch)), model)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    weighted(packed_forward(model, batch)).backward()
    assert len(calls) == 2  # computed anew in the backward
    actual = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert difference(actual, expected) < 1e-10


# The kernel for sequences of different lengths


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """FlashAttention's rule in plain torch: causal, the last query of a segment beside its last key."""
    assert mask is None
    assert cu_seq_lens_q.dtype == cu_seq_lens_k.dtype == torch.int32
    bounds_q, bounds_k = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    assert (bounds_q[0], bounds_q[-1]) == (0, query.shape[2])
    assert (bounds_k[0], bounds_k[-1]) == (0, key.shape[2])
    lengths = [(b - a, d - c) for a, b, c, d in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False)]
    assert (max_length_q, max_length_k) == tuple(map(max, zip(*lengths, strict=True)))
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs = []
    for segment, (queries, keys) in enumerate(lengths):
        of_queries = slice(bounds_q[segment], bounds_q[segment] + queries)
        of_keys = slice(bounds_k[segment], bounds_k[segment] + keys)
        scores = scale * query[0, :, of_queries] @ key[0, :, of_keys].transpose(-1, -2)
        sees = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
        outputs.append((weights @ value[0, :, of_keys]).transpose(0, 1))
    return torch.cat(outputs)[None], None


@settings(BASE, max_examples=100)
@given(ragged_rows(), seeds, st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_segments_and_blocks_attend_alike(rows: list[Row], seed: int, heads: tuple[int, int]) -> None:
    packed = pack(padded(rows))
    assert packed is not None
    rng = torch.Generator().manual_seed(seed)
    length, (of_queries, of_keys) = packed.input_ids.shape[1], heads
    query, key, value = (
        torch.randn(1, count, length, width, generator=rng, dtype=torch.float64)
        for count, width in ((of_queries, 8), (of_keys, 8), (of_keys, 6))
    )
    module = SimpleNamespace(num_key_value_groups=of_queries // of_keys, is_causal=True)
    options: dict[str, Any] = {"scaling": 0.4, "dropout": 0.0}
    blocks, _ = attend_in_blocks(sdpa_attention_forward, module, query, key, value, packed, **options)
    segments, _ = attend_in_segments(varlen_attention, module, query, key, value, packed, **options)
    assert blocks.shape == (1, length, of_queries, 6)
    torch.testing.assert_close(segments, blocks, rtol=0, atol=1e-12)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The attention functions of transformers, as they were again after the test."""
    mapping = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", mapping)
    return mapping


def test_a_model_with_flash_attention_takes_segments(llama: Any, interfaces: dict[str, Any]) -> None:
    interfaces["flash_attention_of_the_test"] = varlen_attention
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_of_the_test"
    assert why_not_packed(model) is None
    model = sharp(model)
    batch = padded([*SHAPES["several rows a prompt"], *SHAPES["all prompts different"]], left=1)
    ours, plain = packed_forward(model, batch), padded_forward(llama, batch)
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert difference(gradient(weighted(ours), model), gradient(weighted(plain), llama)) < 1e-5


# Which models can


def sized(config: type, model: type, **overrides: Any) -> Any:
    known = {key: value for key, value in SIZES.items() if hasattr(config(), key)}
    return model(config(**(known | overrides)))


CANNOT: dict[str, tuple[Any, str]] = {
    "a window in some layers": (
        lambda: tiny_qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1),
        r"Qwen2ForCausalLM has layers that are not full attention \(sliding_attention\)",
    ),
    "a window in all layers": (
        lambda: sized(MistralConfig, MistralForCausalLM, sliding_window=4),
        r"MistralForCausalLM has layers that are not full attention \(sliding window\)",
    ),
    "linear attention": (
        lambda: sized(
            MiniMaxConfig,
            MiniMaxForCausalLM,
            layer_types=["linear_attention", "full_attention"],
            head_dim=8,
            num_local_experts=2,
            block_size=8,
        ),
        r"MiniMaxForCausalLM has layers that are not full attention \(linear_attention\)",
    ),
    "convolutions": (
        lambda: sized(Lfm2Config, Lfm2ForCausalLM, layer_types=["conv", "full_attention"]),
        r"Lfm2ForCausalLM has layers that are not full attention \(conv\)",
    ),
    "a recurrent model": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)),
        "MambaForCausalLM does not take an attention function",
    ),
    "an encoder": (
        lambda: BartForConditionalGeneration(
            BartConfig(
                vocab_size=VOCAB,
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
            )
        ),
        "BartForConditionalGeneration does not take an attention function",
    ),
    "learned positions": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2)),
        "GPT2LMHeadModel has no rotary embedding of a fixed scale",
    ),
    "a rope that depends on the length": (
        lambda: tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}),
        "LlamaForCausalLM has no rotary embedding of a fixed scale",
    ),
    "eager attention": (
        lambda: tiny_llama(attn_implementation="eager"),
        "attn_implementation is 'eager', not 'sdpa' or a flash_attention",
    ),
    "images": (lambda: tiny_llava()[0], "LlavaForConditionalGeneration takes images"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_a_model_that_cannot_says_why(case: str) -> None:
    build, reason = CANNOT[case]
    assert re.fullmatch(reason, str(why_not_packed(build())))


def same(model: nn.Module) -> bool:
    with torch.no_grad():
        return same_in_both_layouts(model, tolerance=1e-3, device=torch.device("cpu"))


def test_a_good_model_is_the_same_in_both_layouts(llama: Any) -> None:
    assert same(llama)


def test_an_attention_that_ignores_the_layout_is_found_out(llama: Any, interfaces: dict[str, Any]) -> None:
    def ignores(*args: Any, packed: Any = None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    interfaces["sdpa"] = ignores
    assert not same(llama)


def test_an_attention_that_takes_another_length_is_found_out(llama: Any, interfaces: dict[str, Any]) -> None:
    interfaces["sdpa"] = lambda *args, packed=None, **kwargs: sdpa_attention_forward(*args, **kwargs)[0][:, :2]
    assert not same(llama)


def test_a_backbone_that_ignores_the_positions_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(tiny_llama())
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *a, position_ids=None, **kwargs: forward(*a, **kwargs))
    assert not same(model)


def test_a_backbone_that_does_not_know_the_argument_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(tiny_llama())
    forward = model.model.forward

    def strict(
        input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, use_cache: Any = None
    ) -> Any:
        return forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

    monkeypatch.setattr(model.model, "forward", strict)
    assert not same(model)


def test_dropout_in_the_config_or_in_a_module_is_seen() -> None:
    assert not draws_dropout(tiny_llama())
    assert draws_dropout(tiny_llama(attention_dropout=0.1))
    assert draws_dropout(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.1)))
    assert draws_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert not draws_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_dropout_of_an_adapter_is_seen(rate: float) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=rate)
    assert draws_dropout(peft.get_peft_model(tiny_llama(), config)) is (rate > 0)

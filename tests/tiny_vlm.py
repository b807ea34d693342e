"""Tiny vision-language models with their processors, made here so that no test needs a hub."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from tiny import SPECIAL, WORDS, make_tokenizer
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
IMAGE_TOKENS = ("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def template(image: str) -> str:
    return (
        "{% for m in messages %}<|im_start|> {{ m['role'] }} "
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}" + image + " {% else %}{{ part['text'] }} "
        "{% endif %}{% endfor %}<|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *IMAGE_TOKENS]})
    assert len(tokenizer) == len(SPECIAL) + len(WORDS) + len(IMAGE_TOKENS) <= TEXT["vocab_size"]
    return tokenizer


def _finished(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # as in `tiny.save_tiny_model`
        for name, weight in model.named_parameters():
            if "visual" in name or "vision" in name or "projector" in name:
                weight.mul_(10)  # or an image would say next to nothing
    return model


def tiny_llava(seed: int = 0) -> tuple[PreTrainedModel, ProcessorMixin]:
    """LLaVA: one block of pixels an image, so that a batch is split by the number of images of a row."""
    tokenizer = _tokenizer()
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=Qwen2Config(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return _finished(LlavaForConditionalGeneration(config)), processor


class ImagesOnly(Qwen2VLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def tiny_qwen2_vl(seed: int = 0) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Qwen2-VL: rows of patches, as many as the grid of each image says."""
    tokenizer = _tokenizer()
    processor = ImagesOnly(
        Qwen2VLImageProcessorPil(
            patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
        ),
        tokenizer,
        None,
        chat_template=template("<|vision_start|> <|image_pad|> <|vision_end|>"),
    )
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(seed)
    config = Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return _finished(Qwen2VLForConditionalGeneration(config)), processor


def pictures(prompts: list[str]) -> Dataset:
    """Conversations with images of different sizes; the second has two of them."""
    rng = np.random.default_rng(0)

    def picture(width: int, height: int) -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))

    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": text}] for text in prompts],
            "images": [
                [picture(16, 16 + 8 * (row % 3)), picture(24, 16)] if row == 1 else [picture(16 + 8 * (row % 2), 16)]
                for row in range(len(prompts))
            ],
        }
    )

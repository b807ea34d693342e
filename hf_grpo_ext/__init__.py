"""NeMo-RL's advantage estimators and clipped policy-gradient loss as a plugin for TRL's GRPO trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .advantages import AdvEstimatorConfig, get_advantage_estimator
from .loss import PRESETS, ClippedPGLossConfig, ClippedPGLossFn
from .rewards import get_gdpo_reward_component_keys

if TYPE_CHECKING:
    from .async_config import AsyncGRPOExtConfig
    from .async_trainer import AsyncGRPOExtTrainer
    from .callbacks import StopBrokenRun
    from .config import GRPOExtConfig
    from .trainer import GRPOExtTrainer

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AdvEstimatorConfig",
    "AsyncGRPOExtConfig",
    "AsyncGRPOExtTrainer",
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "GRPOExtConfig",
    "GRPOExtTrainer",
    "StopBrokenRun",
    "get_advantage_estimator",
    "get_gdpo_reward_component_keys",
]

# The trainer pulls in TRL, which takes seconds; the mathematics does not need it.
_LAZY = {
    "AsyncGRPOExtConfig": ".async_config",
    "AsyncGRPOExtTrainer": ".async_trainer",
    "GRPOExtConfig": ".config",
    "GRPOExtTrainer": ".trainer",
    "StopBrokenRun": ".callbacks",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

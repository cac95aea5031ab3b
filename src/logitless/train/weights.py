"""Weights: hub folders (``config.json`` and safetensors, in one or several files), and GGUF by name.

Files name one tensor per layer and map, ``[out, in]``; the model stacks the layers and applies ``x @ w`` with
``[in, out]``. :class:`TensorNames` says how a format names things; :class:`ModelFile` does the rest, for all formats:
each tensor is read and written into its place on the device, so that the peak is the model plus a tensor for each
thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless.train.architectures import config_from_hf
from logitless.train.files import in_a_line, package
from logitless.train.model import ModelConfig, ModelError, Params, layer_shapes, param_shapes

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_THREADS = 4


def threads() -> int:
    """How many load weights: a few, since they share one interpreter and one path to the device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _THREADS)


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How a file format names the tensors of the model."""

    top: dict[str, str]
    layer: dict[str, str]
    prefix: str
    """Prefix of a layer's tensors, with ``{i}`` for its index."""

    def of_layer(self, name: str, i: int) -> str:
        """The name of a tensor in layer ``i``."""
        return self.prefix.format(i=i) + self.layer[name]


HF_NAMES = TensorNames(
    top={"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"},
    layer={
        "attention_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj.weight",
        "k": "self_attn.k_proj.weight",
        "v": "self_attn.v_proj.weight",
        "o": "self_attn.o_proj.weight",
        "q_bias": "self_attn.q_proj.bias",
        "k_bias": "self_attn.k_proj.bias",
        "v_bias": "self_attn.v_proj.bias",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
    prefix="model.layers.{i}.",
)


@partial(jax.jit, donate_argnums=0)
def _put_layer(stack: Array, i: Array, tensor: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stack, tensor.T.astype(stack.dtype), i, 0)


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """An open file (or folder of files) of weights; tensor names follow the file format."""

    source: str
    config: ModelConfig
    names: TensorNames
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors in the file."""
    read: Callable[[str, Any], Any]
    """A tensor by its name, in or to be cast to a dtype."""

    def check(self) -> None:
        """Refuse a file without the model's tensors in their shapes (``[out, in]``), or with others."""
        config, names = self.config, self.names
        wanted = {names.top[name]: shape for name, shape in param_shapes(config).items() if name != "layers"}
        for name, shape in layer_shapes(config).items():
            wanted |= {names.of_layer(name, i): shape[::-1] for i in range(config.num_layers)}
        # A file may hold a tied head, and buffers that older exports wrote.
        ignored = {names.prefix.format(i=i) + "self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
        ignored |= {names.top["lm_head"]} if config.tie_word_embeddings else set()
        missing = [name for name in wanted if name not in self.shapes]
        unknown = sorted(set(self.shapes) - set(wanted) - ignored)
        for found, what in ((missing, "missing from it"), (unknown, "that this architecture has no place for")):
            if found:
                more = f" and {len(found) - 3} more" if len(found) > 3 else ""
                raise ModelError(f"{self.source}: tensors {what}: {', '.join(found[:3])}{more}.")
        for name, shape in wanted.items():
            if (given := self.shapes[name]) != shape:
                raise ModelError(
                    f"{self.source}: tensor {name!r} has shape {given}, the configuration asks for {shape}."
                )

    def params(self, dtype: Any) -> Params:
        """The parameter tree on the device."""
        config, names = self.config, self.names
        shapes = param_shapes(config)
        params: Params = {
            name: jnp.asarray(self.read(names.top[name], dtype), dtype).reshape(shape)
            for name, shape in shapes.items()
            if name != "layers"
        }
        head, embed = names.top["lm_head"], names.top["embed"]
        held_twice = config.tie_word_embeddings and head in self.shapes
        if held_twice and not np.array_equal(self.read(head, dtype), self.read(embed, dtype)):
            text = f"the configuration ties the head to the embedding, but {head!r} differs from it."
            raise ModelError(f"{self.source}: {text}")

        def stacked(name: str) -> Array:
            shape = shapes["layers"][name]
            stack = jnp.zeros(shape, dtype)
            for i in range(config.num_layers):
                tensor = jnp.asarray(self.read(names.of_layer(name, i), dtype))
                stack = _put_layer(stack, np.int32(i), tensor.reshape(shape[:0:-1]))
            return stack

        with ThreadPoolExecutor(threads()) as pool:
            params["layers"] = dict(zip(shapes["layers"], pool.map(stacked, shapes["layers"]), strict=True))
        return params


@contextlib.contextmanager
def open_model(source: str | Path, cache_dir: str | Path | None = None) -> Iterator[ModelFile]:
    """The model at ``source``: a hub folder, a ``.gguf`` file, a hub id, or a name that scripts/fetch.py fetched."""
    from logitless.train.gguf import gguf_model
    from logitless.train.hub import local_source

    path = local_source(source, cache_dir)
    with untrusted(path), contextlib.ExitStack() as stack:
        file = gguf_model(path) if path.suffix == ".gguf" else stack.enter_context(_open_folder(path))
        file.check()
        yield file


def load_model(
    source: str | Path, dtype: Any = jnp.float32, cache_dir: str | Path | None = None
) -> tuple[ModelConfig, Params]:
    """Shape and weights of the model at ``source``."""
    with open_model(source, cache_dir) as file:
        return file.config, file.params(dtype)


@contextlib.contextmanager
def untrusted(path: Path) -> Iterator[None]:
    """Reading a file from elsewhere: whatever its bytes make the readers raise is an error of the file, by its name."""
    try:
        yield
    except (ModelError, OSError):
        raise
    except Exception as error:
        raise ModelError(f"{path}: not readable as a model: {in_a_line(error)}") from error


def _shards(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Weight files expected in the folder, and each tensor's file if an index names it."""
    index = folder / _INDEX
    where = _weight_map(index) if index.exists() else None
    return ([_SINGLE] if where is None else sorted(set(where.values()))), where


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[ModelFile]:
    """A hub folder: ``config.json`` with ``model.safetensors``, or its shards and their index."""
    config = config_from_hf(read_json(folder / "config.json"))
    advice = "safetensors files need the safetensors package: pip install 'logitless[train]'"
    safe_open = package("safetensors.numpy", ModelError(advice)).safe_open
    names, where = _shards(folder)
    if where is None and not (folder / _SINGLE).exists():
        raise ModelError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}.")
    files: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                files[name] = stack.enter_context(safe_open(folder / name, framework="np"))
            except FileNotFoundError:
                raise ModelError(f"{folder}: {_INDEX} names {name}, which is not there.") from None
            except Exception as error:
                raise ModelError(f"{folder / name}: not readable as safetensors: {error}") from None
        held = {tensor: file for file, opened in files.items() for tensor in opened.keys()}  # noqa: SIM118
        for tensor, file in (where or {}).items():
            if tensor not in files[file].keys():  # noqa: SIM118 (not a dictionary)
                raise ModelError(f"{folder}: {_INDEX} says that {file} holds {tensor!r}; it does not.")
        tensors = {tensor: files[file] for tensor, file in (held if where is None else where).items()}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in tensors.items()}
        yield ModelFile(str(folder), config, HF_NAMES, shapes, lambda name, _: tensors[name].get_tensor(name))


def missing_shards(folder: Path) -> list[str]:
    """Files of weights that the folder should hold and does not."""
    return [file for file in _shards(folder)[0] if not (folder / file).exists()]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor names, and files next to the index with these tensors."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ModelError(f"{index}: weight_map is not an object of tensor names and file names.")
    for name, file in found.items():
        if Path(file).name != file or file in ("", ".", ".."):
            raise ModelError(f"{index}: {name!r} is in {file!r}, which is not a file of this folder.")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A model folder's JSON file, which must hold an object."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors.") from None
    except (ValueError, RecursionError) as error:  # broken, not UTF-8, a number of 5,000 digits; nested too deep
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds {type(content).__name__}, expected a JSON object.")
    return content

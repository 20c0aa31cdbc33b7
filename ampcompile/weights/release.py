"""`release_masters`: serve a compiled model with 16-bit weights where only rounded numbers are read."""

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.dtypes import short_name
from ampcompile.errors import UnsupportedError
from ampcompile.torch_private import dispatcher, marks, patches, storages

from .copies import Copy
from .spec import hoistable
from .store import key_of, store

_released: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
"""The 16-bit storages of released weights, by their keys, which no other storage gets while they are here."""
_refusing: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with our hook on `load_state_dict`
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose masters were released


class ReleasedMasters:
    """The weights that became 16-bit parameters, and the way back. `str` lists those that stayed in float32.

    `bytes_freed`: by the parameters. `kept`: why each weight that is still in float32 is, by its name.
    """

    def __init__(self, model: nn.Module, bytes_freed: int, kept: dict[str, str]) -> None:
        self._model, self.bytes_freed, self.kept = model, bytes_freed, kept

    def __str__(self) -> str:
        lines = [f"{name} is kept in float32: {because}" for name, because in self.kept.items()]
        return "\n".join([*lines, f"{self.bytes_freed:,} bytes freed"])

    @marks.run_untraced
    def restore(self, checkpoint: Mapping[str, Tensor] | str | PathLike[str]) -> None:
        """Make the released weights float32 again, and load all of the model from `checkpoint`, as `load_state_dict`.

        `checkpoint`: a state dict of the model, or a file for `torch.load`. Everything is loaded, not only what was
        released, so that the model is that of one checkpoint. Raises UnsupportedError, and changes nothing, if a
        released weight isn't there in its shape; else what `load_state_dict` raises.
        """
        loaded = checkpoint
        if not isinstance(loaded, Mapping):
            loaded = torch.load(loaded, map_location="cpu", weights_only=True, mmap=True)
        numbers = {name.removeprefix("_orig_mod."): value for name, value in loaded.items()}
        released = {name: weight for name, weight in self._model.named_parameters() if is_released(weight)}
        for name, weight in released.items():
            shape = tuple(getattr(numbers.get(name), "shape", ()))
            if name not in numbers or shape != weight.shape:
                raise UnsupportedError(
                    f"found {f'a tensor of {shape}' if name in numbers else 'nothing'} under {name!r} in the "
                    f"checkpoint, expected a tensor of {tuple(weight.shape)}: pass what state_dict() of "
                    f"{type(self._model).__name__} gave before release_masters."
                )
        with torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
            masters = {name: numbers[name].to(weight.device, torch.float32) for name, weight in released.items()}
            for name, weight in released.items():
                weight.data = torch.empty_like(weight, dtype=torch.float32).copy_(masters.pop(name))
        self._model.load_state_dict(numbers)


def is_released(weight: Tensor) -> bool:
    """Return True for a weight that is a 16-bit parameter because its master was released."""
    return key_of(weight) in _released


@marks.run_untraced
def release_masters(model: nn.Module, keep: Iterable[str] = ()) -> ReleasedMasters:
    """Turn the weights that compiled graphs read only in 16 bits into 16-bit parameters, for serving.

    Call it after a call with each shape, in the mode and grad mode that you serve in: these graphs show what is read in
    which type. Then every graph is compiled once more, at its next call. The numbers that are read stay the same, and a
    16-bit weight needs no copy, so nothing has to be proven about it. What a graph reads in float32 too (a norm's
    weight, an embedding tied to the head), or in two 16-bit types, stays as it is; so does a weight that no compiled
    graph reads in 16 bits, that a CUDA graph reads, that has a gradient, or whose memory something else holds. `keep`:
    names of further weights or modules to keep, such as those that code outside of autocast reads. No call of the model
    may run in another thread meanwhile.

    `restore` of the result gives float32 numbers back from a checkpoint; so does that of a second call's result, which
    releases what can be released by then. Until then an optimizer's step on a released weight, and `load_state_dict` of
    other than 16-bit numbers into one without `assign=True`, raise UnsupportedError: they would round silently.

    Raises UnsupportedError, and changes nothing, if the model has weights that FSDP gathers or DTensors, or no weight
    that can be released.

    >>> checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    >>> with torch.no_grad():
    ...     expected = compiled(x)
    ...     released = ampcompile.release_masters(model)
    ...     assert torch.equal(compiled(x), expected)
    >>> released.bytes_freed > 0
    True
    >>> released.restore(checkpoint)
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"found {type(model).__name__!r}, expected a torch.nn.Module: pass the model.")
    model = getattr(model, "_orig_mod", model)
    weights, kept_names = dict(model.named_parameters()), [keep] if isinstance(keep, str) else list(keep)
    gathered = storages.gathered_by_fsdp()
    for name, weight in weights.items():
        if storages.include_dtensors([weight]) or storages.is_managed_by_fsdp(weight, gathered):
            raise UnsupportedError(
                f"found {name}, which is sharded; expected plain parameters: sharded weights keep their masters, see "
                "ampcompile.shard_policy."
            )
    for name in kept_names:
        if not any(_is_within(weight, [name]) for weight in weights):
            raise UnsupportedError(f"found keep={name!r}, expected the name of a weight or module of the model.")
    with store.lock, torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
        dtypes, reasons = _dtypes_read(weights, kept_names, gathered)
        if not dtypes and not any(map(is_released, weights.values())):
            raise UnsupportedError(
                f"found no weight of {type(model).__name__} that compiled graphs read in 16 bits, and only so; "
                "expected one: call the compiled model first, with each shape, under torch.no_grad(), and keep no "
                "tensors on its weights' memory, as a state dict does."
            )
        _refuse_steps()
        _refuse_loads(model)
        for name, dtype in dtypes.items():
            weight, rounded = weights[name], weights[name].detach().to(dtype)
            weight.data = rounded
            _released[storages.storage_key(weight)] = storages.untyped_storage(weight)
    freed = sum(2 * weight.numel() for weight in weights.values() if is_released(weight))
    return ReleasedMasters(model, freed, reasons)


def _dtypes_read(
    weights: Mapping[str, Tensor], kept_names: Iterable[str], gathered: Mapping[int, Tensor]
) -> tuple[dict[str, torch.dtype], dict[str, str]]:
    """Return the type that each weight can have, and why the others stay in float32."""
    read_whole, dtypes, reasons = store.read_whole(), dict[str, torch.dtype](), dict[str, str]()
    copies_of = defaultdict[int | None, list[Copy]](list)
    for copy in list(store.copies.values()):
        copies_of[copy.key].append(copy)
    for name, weight in weights.items():
        if is_released(weight):
            continue
        copies = copies_of[key_of(weight)]
        read = {copy.form.dtype for copy in copies}
        if _is_within(name, kept_names):
            reasons[name] = "asked for"
        elif not hoistable(weight, gathered) or weight.dtype != torch.float32 or not read:
            reasons[name] = "no compiled graph reads it in 16 bits"
        elif key_of(weight) in read_whole:
            reasons[name] = "a compiled graph reads it in float32"
        elif any(copy.form.quantized for copy in copies):
            reasons[name] = "a compiled graph reads it in 8 bits"
        elif any(copy.in_place for copy in copies):
            reasons[name] = "a CUDA graph reads it"
        elif len(read) > 1:
            reasons[name] = f"compiled graphs read it as {' and '.join(sorted(map(short_name, read)))}"
        elif weight.grad is not None:
            reasons[name] = "it has a gradient"
        elif store.table.holders_of(weight) > 1:
            reasons[name] = "something else holds its memory"
        else:
            dtypes[name] = read.pop()
    return dtypes, reasons


def _is_within(name: str, kept_names: Iterable[str]) -> bool:
    return any(name == kept or name.startswith(f"{kept}.") for kept in kept_names)


@functools.cache
def _refuse_steps() -> None:
    patches.add_optimizer_hooks(refuse_step, lambda *_: None)


def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise UnsupportedError for a step on released weights."""
    if _released and any(is_released(param) for group in optimizer.param_groups for param in group["params"]):
        raise UnsupportedError(
            "found a step on a weight that ampcompile.release_masters turned into a 16-bit parameter, whose update "
            "would be rounded; expected float32 weights: call restore(checkpoint) of its result first."
        )


def _refuse_loads(model: nn.Module) -> None:
    _models.add(model)
    for module in model.modules():
        if module not in _refusing:
            _refusing.add(module)
            module.register_load_state_dict_pre_hook(_refuse_load)


def _refuse_load(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):
        return
    # Whoever calls `load_state_dict` of this module, or the model as a part of another one, finds all that it holds.
    for name, weight in module.named_parameters(recurse=not prefix or module in _models):
        loaded = state.get(prefix + name)
        if is_released(weight) and loaded is not None and loaded.dtype != weight.dtype:
            raise UnsupportedError(
                f"found {short_name(loaded.dtype)} numbers to load into {prefix + name}, which "
                f"ampcompile.release_masters turned into {short_name(weight.dtype)}; expected no silent rounding: call "
                "restore(checkpoint) of its result, or load_state_dict(checkpoint, assign=True)."
            )

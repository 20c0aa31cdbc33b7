"""`release_masters`: serve a compiled model without the float32 numbers that no compiled graph reads."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.errors import ReleasedError
from ampcompile.torch_private import dispatcher, dtensors, storages

from .copies import Copy, copies_of, refresh
from .remains import Remains, forget, record_of, refusal
from .spec import hoistable
from .store import store

_REFUSED = ("train", "_apply", "state_dict", "_load_from_state_dict")
"""Methods of modules that read or write weights, or call for it; `.to()`, `.half()` and the like use `_apply`."""


class ReleasedMasters:
    """The weights that were released and kept, and the way back. `str` lists those that stayed in float32.

    `bytes_freed`: of float32 numbers. `kept`: why each weight that is still in float32 is, by its name.
    """

    def __init__(self, model: nn.Module, bytes_freed: int, kept: dict[str, str]) -> None:
        self._model, self.bytes_freed, self.kept = model, bytes_freed, kept

    def __str__(self) -> str:
        lines = [f"{name} is kept in float32: {because}" for name, because in self.kept.items()]
        return "\n".join([*lines, f"{self.bytes_freed:,} bytes freed"])

    def restore(self, checkpoint: Mapping[str, Tensor] | str | PathLike[str]) -> None:
        """Give the released weights memory again, and load all of the model from `checkpoint`, as `load_state_dict`.

        `checkpoint`: a state dict of the model, or a file for `torch.load`. Everything is loaded, not only what was
        released, so that the model is that of one checkpoint. Raises ReleasedError, and changes nothing, if a released
        weight isn't there in its shape; else what `load_state_dict` raises.
        """
        loaded = checkpoint
        if not isinstance(loaded, Mapping):
            loaded = torch.load(loaded, map_location="cpu", weights_only=True, mmap=True)
        numbers = {name.removeprefix("_orig_mod."): value for name, value in loaded.items()}
        released = {name: weight for name, weight in self._model.named_parameters() if record_of(weight) is not None}
        for name, weight in released.items():
            shape = tuple(getattr(numbers.get(name), "shape", ()))
            if name not in numbers or shape != weight.shape:
                raise ReleasedError(
                    f"found {f'a tensor of {shape}' if name in numbers else 'nothing'} under {name!r} in the "
                    f"checkpoint, expected a tensor of {tuple(weight.shape)}: pass what state_dict() of "
                    f"{type(self._model).__name__} gave before release_masters."
                )
        with store.lock, torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
            masters = {
                name: torch.empty_like(weight, requires_grad=False).copy_(numbers[name])
                for name, weight in released.items()
            }
            _wait_for_devices(released.values())
            for name, weight in released.items():
                storages.write_data(weight, masters[name])
                forget(id(weight))
            _allow(self._model)
        self._model.load_state_dict(numbers)


def release_masters(model: nn.Module, keep: Iterable[str] = ()) -> ReleasedMasters:
    """Free the float32 numbers of the weights that compiled graphs read only in 16 bits, for serving.

    Call it once every graph is compiled: after a call with each shape, in the mode and grad mode that you serve in. Of
    each weight what these graphs read stays, so results keep their bits. What a graph reads in float32 too (a norm's
    weight, an embedding tied to the head) stays as it is, and so does what can't be proven: a weight that no compiled
    graph reads in 16 bits, or whose memory something else holds. `keep`: names of further weights or modules to keep,
    such as those that code outside of compiled graphs reads.

    Afterwards `train()`, `state_dict`, `load_state_dict`, `.to()`, copies and pickles of the model, reads and writes of
    a released weight, and graphs that are compiled later raise an error: a ReleasedError, or torch's RuntimeError with
    the same text. `restore` of the result undoes it from a checkpoint; so does that of a second call's result, which
    releases what can be released by then. No eager code of the model may run in another thread meanwhile.

    Raises ReleasedError, and changes nothing, if the model has weights that FSDP gathers or DTensors, or no weight that
    can be released.

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
        raise ReleasedError(f"found {type(model).__name__!r}, expected a torch.nn.Module: pass the model.")
    model = getattr(model, "_orig_mod", model)
    weights, kept_names = dict(model.named_parameters()), [keep] if isinstance(keep, str) else list(keep)
    for name, weight in weights.items():
        if dtensors.includes([weight]) or storages.is_managed_by_fsdp(weight):
            raise ReleasedError(
                f"found {name}, which is sharded; expected plain parameters: sharded weights keep their masters, see "
                "ampcompile.shard_policy."
            )
    for name in kept_names:
        if not any(_is_within(weight, [name]) for weight in weights):
            raise ReleasedError(f"found keep={name!r}, expected the name of a weight or module of the model.")
    storages.memory_discarder()  # which may have to be compiled
    with store.lock, torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes():
        reasons = _reasons_to_keep(weights, kept_names)
        found = {name: weight for name, weight in weights.items() if not reasons[name] and record_of(weight) is None}
        if not found and all(record_of(weight) is None for weight in weights.values()):
            raise ReleasedError(
                f"found no weight of {type(model).__name__} that compiled graphs read in 16 bits, and only so; "
                "expected one: call the compiled model first, with each shape, under torch.no_grad(), and keep no "
                "tensors on its weights' memory, as a state dict does."
            )
        _release(found)
        _refuse(model)
    freed = sum(weight.numel() * weight.itemsize for name, weight in weights.items() if not reasons[name])
    return ReleasedMasters(model, freed, {name: because for name, because in reasons.items() if because})


def _reasons_to_keep(weights: Mapping[str, Tensor], kept_names: Iterable[str]) -> dict[str, str]:
    """Return why each weight stays in float32; empty: it needn't."""
    read_whole, reasons, sharers = store.read_whole(), dict[str, str](), defaultdict[Any, list[str]](list)
    for name, weight in weights.items():
        if record_of(weight) is not None:
            reasons[name] = ""
            continue
        reasons[name] = "asked for" if _is_within(name, kept_names) else _reason_to_keep(weight, read_whole)
        if not reasons[name]:
            sharers[copies_of(weight)[0].memory].append(name)
    for memory, names in sharers.items():
        if not memory.held_only_by(len(names)):
            reasons |= dict.fromkeys(names, "something else holds its memory")
    return reasons


def _reason_to_keep(weight: Tensor, read_whole: set[int]) -> str:
    if not hoistable(weight) or not (copies := copies_of(weight)):
        return "no compiled graph reads it in 16 bits"
    if storages.storage_key(weight) in read_whole:
        return "a compiled graph reads it in float32"
    if any(copy.in_place or copy in store.captured for copy in copies):
        return "a CUDA graph reads it"
    return ""


def _is_within(name: str, kept_names: Iterable[str]) -> bool:
    return any(name == kept or name.startswith(f"{kept}.") for kept in kept_names)


def _release(found: Mapping[str, Tensor]) -> None:
    """Make all copies anew or compare all their bits, and only then free the weights' memory, which can't fail."""
    copies = {name: copies_of(weight) for name, weight in found.items()}
    memories = {copy.memory for each in copies.values() for copy in each}
    for copy_set in list(store.sets):
        if not memories.isdisjoint(copy_set.memories):
            copy_set.free()
    reads = [(copy, weight, None) for name, weight in found.items() for copy in copies[name]]
    for copy, *_ in reads:
        copy.packed, copy.reads = {}, 0  # a packed form can't be compared
    refresh(reads, memories, {})
    for copy, *_ in reads:
        _pack(copy)
    _wait_for_devices(found.values())
    store.change_buffers()  # first: a thread that found copies fresh looks again
    for name, weight in found.items():
        store.released[id(weight)] = Remains(name, weight, {copy.form: copy for copy in copies[name]})
    store.released_epoch = object()
    for name, weight in found.items():
        storages.discard_memory(weight, refusal(f"a read or write of {name} by other code"))


def _pack(copy: Copy) -> None:
    """Pack a copy for its readers: no update comes that could make it not pay."""
    for blocks, readers in list(copy.readers.items()):
        if blocks is not None and readers:
            copy.pack(blocks)


def _wait_for_devices(weights: Iterable[Tensor]) -> None:
    """Wait for what runs on the weights' GPUs: it may read or write what is about to be freed or read."""
    for device in {weight.device for weight in weights if weight.is_cuda}:
        torch.cuda.synchronize(device)


class _Refusal:
    """Stands in a module's `__dict__` for a method of its class, and raises ReleasedError; `eval` goes on working."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name, self._training = weakref.ref(module), name, module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if not _has_released(module):  # restored by way of another module that has it
            _allow(module)
            return getattr(module, self._name)(*args, **kwargs)
        if self._name == "train":
            if not (args[0] if args else kwargs.get("mode", True)):
                self._training = False
                return type(module).train(module, False)
            module.training = self._training  # which a wrapper may have set already
        name = {"_apply": "to() or another conversion", "_load_from_state_dict": "load_state_dict"}.get(self._name)
        raise ReleasedError(refusal(f"a call of {name or self._name} of {type(module).__name__}"))


def _refuse(model: nn.Module) -> None:
    for module in model.modules():
        if _has_released(module):
            vars(module).update({name: _Refusal(module, name) for name in _REFUSED})


def _has_released(module: nn.Module) -> bool:
    return any(record_of(weight) is not None for weight in module.parameters())


def _allow(model: nn.Module) -> None:
    for module in model.modules():
        for name in _REFUSED:
            if isinstance(vars(module).get(name), _Refusal):
                del vars(module)[name]

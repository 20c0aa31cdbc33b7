"""`capture_step`: a whole training step, forward, backward, clipping, update and scale, as one CUDA graph."""

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import CaptureError
from ampcompile.kernels import planned
from ampcompile.optim.families import counts_on_device, parameters
from ampcompile.torch_private import marks, pytree, storages
from ampcompile.weights import CapturedCopies

from .step_graph import NoGraph, StepGraph

DEVICE = "cuda"  # the type of devices that have graphs
_grad_of = operator.attrgetter("grad")


class CapturedStep:
    """The result of `capture_step`: a call is one step. `captured`: True once steps are replays of a graph."""

    captured = False

    def __init__(self, step: Callable[..., Any], optimizers: Sequence[torch.optim.Optimizer], warm_up: int) -> None:
        self._step, self._optimizers, self._warm_up, self._calls = step, optimizers, warm_up, 0
        self._params = [param for optimizer in optimizers for param in parameters(optimizer)]
        on_gpu = _device_type(self._params) == DEVICE
        self._graph = StepGraph(self._params[0].device) if on_gpu else NoGraph()
        self._inputs: list[Any] = []
        self._form: Any = None  # the arguments of the first call, with shapes and types for tensors
        self._result: Any = None
        self._known: dict[Any, Any] | None = None  # the settings of all groups, which a graph keeps
        self._held: list[Any] = []  # the values of these, so that no other tensor gets the id of one
        self._unmoved: list[Callable[[], bool]] = []  # of each optimizer, if its weights and state are where they were
        self._copies = CapturedCopies(self._params)
        # Parameters, and their gradients to which the graph adds, None where it makes one; and those that it leaves.
        self._grads_before: tuple[list[Tensor], list[Any]] = [], []
        self._grads_after: tuple[list[Tensor], list[Any]] = [], []

    @marks.run_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take one step with these inputs; returns what the step does, the same tensors in each replay."""
        self._take(args, kwargs)
        if self._known is not None:
            self._require_unchanged(self._known)
        elif self._calls < self._warm_up:
            self._calls += 1
            if self._calls < self._warm_up:
                return self._before_capture(self._graph.warm_up, strict=False)
            with self._copies.watched():
                return self._before_capture(self._graph.warm_up, strict=self._warm_up > 1)  # by then all is compiled
        if isinstance(self._graph, NoGraph):
            grads = list(map(_grad_of, self._params))
            settings = self._settings()
            result = self._before_capture(self._graph.warm_up, strict=self._known is None)
            self._require_unchanged_within(settings)
            if self._known is None:
                self._fix(grads)
            return result
        if not self.captured:
            self._capture(self._graph)
        self._copies.make_ready()
        try:
            self._graph.replay()
            torch.autograd.graph.increment_version(self._params)
        finally:
            self._copies.note_replayed()
        deque(map(setattr, self._grads_after[0], repeat("grad"), self._grads_after[1]), 0)
        return self._result

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        if isinstance(self._graph, NoGraph):
            state = "each call runs it, as its parameters aren't on a GPU, and checks what a graph would need"
        else:
            state = "each call replays its graph" if self.captured else "each call runs it, before the capture"
        return f"<capture_step({name}): {state}; {self._calls} of {self._warm_up} calls to warm up>"

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write inputs where the graph reads them."""
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, Hashable):  # it may change, or hold tensors, unseen
                raise CaptureError(
                    f"found a {type(leaf).__qualname__} among the arguments, expected tensors, in tuples, lists and "
                    "dicts, and what doesn't change, since a graph keeps what isn't a tensor: make tensors of it, as "
                    "by torch.from_numpy, or pass the tensors that it holds."
                )
        kinds = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        form = pytree.tree_unflatten(kinds, self._structure)
        first = self._form is None
        if first:
            self._form = form
        elif form != self._form:
            raise CaptureError(
                f"found the arguments {form}, expected {self._form} as in the first call, since a graph has fixed "
                "shapes, and keeps what isn't a tensor: fill up the batch, or capture a step for each."
            )
        if isinstance(self._graph, NoGraph):
            self._inputs = leaves
        elif first:
            device = self._params[0].device
            self._inputs = [x.detach().to(device, copy=True) if isinstance(x, Tensor) else x for x in leaves]
        else:
            for place, leaf in zip(self._inputs, leaves, strict=True):
                if isinstance(place, Tensor):
                    place.copy_(leaf.detach(), non_blocking=True)

    def _before_capture(self, run: Callable[..., Any], captures: bool = False, **how: Any) -> Any:
        within = self._copies.recorded if captures else contextlib.nullcontext

        def call() -> Any:
            with within():
                return self._step(*args, **kwargs)

        args, kwargs = pytree.tree_unflatten(self._inputs, self._structure)
        try:
            return run(call, **how)
        except RuntimeError as error:
            words = str(error)
            if "synchroniz" not in words and "captur" not in words:
                raise
            raise CaptureError(
                f"found an operation that waits for the GPU or can't be captured ({words.splitlines()[0]}), expected "
                "none in the step: the traceback above shows its line. Usual ones are .item(), a print of a tensor, "
                "and torch's own GradScaler around an optimizer that isn't fused."
            ) from error

    def _capture(self, graph: StepGraph) -> None:
        for optimizer in self._optimizers:
            _require_capturable(optimizer)
        self._copies.make_fresh()
        grads, settings = list(map(_grad_of, self._params)), self._settings()
        try:
            result = self._before_capture(graph.capture, captures=True)
            self._require_unchanged_within(settings)
        except BaseException:
            self._copies.forget()
            for param, grad in zip(self._params, grads, strict=True):
                param.grad = grad  # nothing ran: new ones hold no numbers
            raise
        self._result = pytree.tree_map_only(Tensor, Tensor.detach, result)
        self._fix(grads)
        self.captured = True

    def _fix(self, grads: Sequence[Tensor | None]) -> None:
        """Note what may not change from now on. `grads`: those before the step that is captured."""
        after = list(map(_grad_of, self._params))
        before = [a is None or a is b for a, b in zip(grads, after, strict=True)]  # else the step forgets them first
        self._grads_before = list(compress(self._params, before)), list(compress(grads, before))
        left = [grad is not None for grad in after]
        self._grads_after = list(compress(self._params, left)), list(compress(after, left))
        self._known, self._unmoved = self._settings(), list(map(_places_of, self._optimizers))
        self._held = [
            value for optimizer in self._optimizers for group in optimizer.param_groups for value in group.values()
        ]

    def _settings(self) -> dict[Any, Any]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return {
            (i, name): id(value) if isinstance(value, Tensor) else value
            for i, group in enumerate(groups)
            for name, value in group.items()
            if name != "params"
        }

    def _require_unchanged_within(self, before: dict[Any, Any]) -> None:
        """Raise if the step itself changed settings: a replay would not."""
        if changed := _changes(before, self._settings()):
            raise CaptureError(
                f"found settings of an optimizer that change within the step, {changed}, expected the same, since a "
                "replay runs no Python: call the scheduler, or what else sets them, between the calls of the captured "
                "step."
            )

    def _require_unchanged(self, former: dict[Any, Any]) -> None:
        if changed := _changes(former, self._settings()):
            raise CaptureError(
                f"found settings of an optimizer that changed since the capture, {changed}, expected the same, since a "
                "graph keeps numbers: make it a tensor on the GPU and write to that (lr=torch.tensor(1e-3, "
                "device='cuda'), capturable=True or fused=True), or capture the step anew."
            )
        if not all(unmoved() for unmoved in self._unmoved):
            raise CaptureError(
                "found weights or state of an optimizer elsewhere than at the capture (by .to(), .data = or "
                "load_state_dict of the optimizer), expected them where the graph writes: capture the step anew."
            )
        params, grads = self._grads_before
        if not all(map(operator.is_, map(_grad_of, params), grads)):
            raise CaptureError(
                "found gradients that aren't those before the capture, of a backward outside of the step or zeroed "
                "otherwise, expected the same or none, as the graph adds to those: zero them in the step, or before "
                "each call in the same way."
            )


def _changes(former: dict[Any, Any], settings: dict[Any, Any]) -> str:
    """What differs, in words."""
    names = [name for name in {**former, **settings} if former.get(name) != settings.get(name)]
    return ", ".join(f"{name[1]}={settings.get(name)} for {former.get(name)}" for name in names)


def _places_of(optimizer: torch.optim.Optimizer) -> Callable[[], bool]:
    """Return what tells if an optimizer's weights and state are still where they are now."""
    if planned.available():
        with contextlib.suppress(TypeError):
            tensors = planned.PlannedTensors(optimizer.param_groups, optimizer.state)
            return lambda: tensors.unmoved(optimizer.param_groups, optimizer.state)
    places = _addresses(optimizer)
    return lambda: _addresses(optimizer) == places


def _addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    """Of weights and state that can't be compared in C++"""
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor.data_ptr() for tensor in (*parameters(optimizer), *values)]


def _device_type(params: Sequence[Tensor]) -> str:
    devices = {str(param.device) for param in params}
    if len(devices) != 1:
        raise CaptureError(
            f"found parameters on {' and '.join(sorted(devices)) or 'no device'}, expected them on one: pass the "
            "optimizers whose steps the step takes, with parameters on one GPU."
        )
    if unlike := [param for param in params if not storages.has_counter(param)]:
        if (param := unlike[0]).is_neg() or param.is_inference():
            raise CaptureError(
                f"found a parameter that is {'a negated view' if param.is_neg() else 'an inference tensor'}, expected "
                "plain ones: make one of param.detach().resolve_neg().clone(), outside inference mode, and the "
                "optimizer of that."
            )
        raise CaptureError(
            f"found a parameter that is a {type(param).__name__}, expected plain ones: sharded models replay their "
            'blocks with mode="reduce-overhead" instead.'
        )
    return params[0].device.type


def _require_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer keeps counts or settings on the host."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, Tensor) and value.device.type != DEVICE:
                raise CaptureError(
                    f"found {name} of {type(optimizer).__name__} as a tensor on the {value.device.type}, expected one "
                    "on the GPU, since a graph keeps the number that the host reads: torch.tensor(..., device='cuda')."
                )
        if "capturable" in group and not counts_on_device({"fused": False, **group}):
            raise CaptureError(
                f"found {type(optimizer).__name__} with capturable=False, which counts its steps on the CPU, expected "
                f"counts on the GPU: make it with {'fused=True or ' * ('fused' in group)}capturable=True."
            )


@marks.run_untraced
def capture_step(step: Callable[..., Any], *optimizers: torch.optim.Optimizer, warm_up: int = 3) -> CapturedStep:
    """Make one CUDA graph of a whole training step, loss scaling included; each call of the result is one step.

    `step` takes tensors (a batch), and does all of a step: forward, backward, clipping, update, `scaler.update()`,
    `zero_grad()`. `optimizers`: those that step in it. The first `warm_up` calls run it as it is, the last of them with
    an error where the host would wait, unless it is the first of all, which compiles; the next call captures it, and
    from then on the host only copies the inputs into place and replays the graph: what it returns is overwritten by the
    next call. The graph reads kept copies of weights, in place. Between calls everything may go on as without a graph:
    what was written is cast before the replay, which marks what it writes itself.

    What a graph needs is checked, and CaptureError says what is missing: inputs of one shape and type, other arguments
    and numbers in the optimizers' settings that stay (a learning rate that changes has to be a tensor on the GPU),
    counts of steps on the GPU, weights and state that stay in place, no wait for the GPU, parameters on one device.
    On a CPU each call runs `step`, and the same is checked, but for the counts and for waits other than `.item()`,
    `if tensor` and the like. `repr` says how far it is.

    >>> optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), ampcompile.GradScaler("cpu")
    >>> def step(x):
    ...     loss = compiled(x).square().mean()
    ...     scaler.scale(loss).backward()
    ...     scaler.clip_grad_norm_(optimizer, 1.0)
    ...     scaler.step(optimizer)
    ...     scaler.update()
    ...     optimizer.zero_grad()
    ...     return loss.detach()
    >>> train = ampcompile.capture_step(step, optimizer)
    >>> loss = train(x)
    """
    for optimizer in optimizers:
        if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
            raise CaptureError(
                f"found {optimizer!r:.60} as an optimizer, expected those whose steps the step takes, one after the "
                "other: ampcompile.capture_step(step, optimizer)."
            )
    if not callable(step) or not isinstance(warm_up, int) or warm_up < 1:
        raise CaptureError(
            f"found step={step!r} and warm_up={warm_up}, expected a function and a number above 0: without a call "
            "before the capture nothing is compiled."
        )
    return CapturedStep(step, optimizers, warm_up)

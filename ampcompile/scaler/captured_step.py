"""`capture_step`: a whole training step, forward, backward, clipping, update and scale, as one CUDA graph."""

import contextlib
import logging
import operator
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import AmpError, CaptureError, warn_user
from ampcompile.kernels import tables
from ampcompile.optim.plan import counts_on_device, parameters
from ampcompile.torch_private import marks, patches, pytree, storages
from ampcompile.weights import CapturedCopies

from .settings import Settings
from .step_graph import NoGraph, StepGraph
from .surroundings import PLAIN, Surroundings

DEVICE = "cuda"  # the type of devices that have graphs
CAPTURED, COUNTED = 16, 64  # the most forms with a graph, and the most whose calls are counted
TOO_OFTEN = 3  # changes of one thing, or values of one number, after which the user is told to do without
log = logging.getLogger(__name__)
_grad_of, _training = operator.attrgetter("grad"), operator.attrgetter("training")


@dataclass(eq=False)
class Recorded:
    """What was captured of a form, and what its graph reads and writes."""

    graph: Any
    places: list[Any]  # where it reads the arguments
    written: list[int]  # the arguments that it writes
    result: Any
    tables: list[Tensor]  # that it reads
    settings: Settings
    surroundings: Surroundings
    set_back: list[str]  # tensors that the step sets without reading them
    # Parameters, and their gradients to which the graph adds, None where it makes one; and those that it leaves.
    grads_before: tuple[list[Tensor], list[Any]]
    grads_after: tuple[list[Tensor], list[Any]]


class Form:
    """Calls of one form: of equal shapes, types and other arguments, in equal surroundings; and their graph."""

    def __init__(self, key: tuple[Any, ...], params: list[Tensor]) -> None:
        self.key, self.arguments = key, _words(key[0])
        self.calls = self.replays = 0  # calls run as they are since the last graph was dropped; replays of all
        self.as_it_is = 0  # calls of all times that ran as they are
        self.only_as_it_is = False
        self.changes: Counter[str] = Counter()
        self.copies = CapturedCopies(params)
        self.graph: Recorded | None = None

    def drop(self) -> None:
        """Forget the graph, of which no replay runs, with all that belongs to it."""
        if self.graph is not None:
            self.graph.tables.clear()
        self.graph = None

    def differs_at(self, i: int, key: tuple[Any, ...]) -> bool:
        """Return True if its calls differ from those of a key in this argument alone, of equal types."""
        mine, theirs = self.key[0], key[0]
        alike = self.key[1:] == key[1:] and mine[i][0] is theirs[i][0]
        return alike and (mine[:i], mine[i + 1 :]) == (theirs[:i], theirs[i + 1 :])


class CapturedStep:
    """The result of `capture_step`: a call is one step. `captured`: True once there is a graph, of some form."""

    captured = False

    def __init__(
        self, step: Callable[..., Any], optimizers: Sequence[torch.optim.Optimizer], warm_up: int, draws_elsewhere: bool
    ) -> None:
        self._step, self._optimizers, self._warm_up = step, optimizers, warm_up
        self._draws_elsewhere = draws_elsewhere
        self._params = _params_of(optimizers)
        self._device = self._params[0].device
        self._on_gpu = self._device.type == DEVICE
        self._graphs: Any = StepGraph(self._device) if self._on_gpu else NoGraph()
        self._proven = False  # something was captured: a step that can't be raises no error any more
        self._forms: dict[Any, Form] = {}
        self._modules = self._look().modules
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, and count calls of each form anew; the host waits for the GPU."""
        self._graphs.wait()
        for form in self._forms.values():
            form.drop()
        self._forms = {}
        self._told: set[str] = set()
        self.captured = False

    @marks.run_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take one step with these inputs; returns what the step does, the same tensors in each replay of a form."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        form = self._form_of(leaves, structure)
        if form.graph is not None:
            changed, counts = self._changed(form, form.graph)
            if not changed:
                return self._replay(form, leaves, structure)
            self._drop(form, changed, counts)
        if form.only_as_it_is:
            return self._run(form, leaves, structure)
        if form.calls < self._warm_up:
            form.calls += 1
            last = form.calls == self._warm_up
            return self._run(form, leaves, structure, watched=last, strict=last and self._warm_up > 1)
        if sum(one.graph is not None for one in self._forms.values()) >= CAPTURED:
            self._warn_of_forms()
            return self._run(form, leaves, structure)
        ran: list[Any] = []
        try:
            return self._capture(form, leaves, structure, ran)
        except Exception as error:
            if not self._proven or not (self._on_gpu or ran):
                raise
            form.only_as_it_is = True
            warn_user(
                f"found a form of a captured step that can't be captured, {form.arguments} ({error}); expected one "
                "like those before: it runs as it is, call by call."
            )
            return ran[0] if ran else self._run(form, leaves, structure)

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        captured = sum(form.graph is not None for form in self._forms.values())
        state = f"each call runs it, before the capture, which comes after {self._warm_up} calls of a form"
        if not self._on_gpu:
            state = "each call runs it, as its parameters aren't on a GPU, and checks what a graph would need"
        elif captured:
            state = "each call of a form that is captured replays its graph"
        lines = [f"{form.arguments}: {form.replays} replays, {form.as_it_is} as it is" for form in self._forms.values()]
        pool, saved = self._graphs.pool_bytes()
        if pool:
            less = f", up to {saved:,} less if the largest form is called first" * bool(saved)
            lines.append(f"{pool:,} bytes of memory for all graphs{less}")
        first = f"<capture_step({name}): {state}; {captured} of {len(self._forms)} forms captured>"
        return "\n  ".join([first, *lines])

    def _form_of(self, leaves: list[Any], structure: Any) -> Form:
        without = tuple(map(operator.is_, map(_grad_of, self._params), repeat(None)))
        key = tuple(map(_kind, leaves)), structure, _modes(), without, tuple(map(_training, self._modules))
        form = self._forms.get(key)
        return self._new_form(key) if form is None else form

    def _new_form(self, key: tuple[Any, ...]) -> Form:
        form, kinds = Form(key, self._params), key[0]
        for i, kind in enumerate(kinds):
            alike = [one for one in self._forms.values() if kind[0] in (int, float) and one.differs_at(i, key)]
            if len(alike) >= TOO_OFTEN - 1 and all(one.as_it_is + one.replays <= 1 for one in alike):
                self._tell(
                    f"found a number among the arguments that differs at each call, the last {kind[1]!r} in "
                    f"{form.arguments}; expected few values, as a graph keeps numbers: pass a tensor. Until then "
                    "such calls run as they are."
                )
                form.only_as_it_is = True
                return form
        if len(self._forms) >= COUNTED:
            self._warn_of_forms()
            for other in [one for one in self._forms.values() if one.graph is None][:1]:
                del self._forms[other.key]
        self._forms[key] = form
        if any(len(kind) == 2 and not isinstance(kind[1], PLAIN) for kind in kinds):
            self._reach(self._look().modules, form)
        return form

    def _look(self, ignored: Collection[str] = ()) -> Surroundings:
        """What the step reaches now, also by arguments that aren't tensors."""
        given = [kind[1] for kinds, *_ in self._forms for kind in kinds if len(kind) == 2]
        roots = {"the step": self._step, **{f"a {type(one).__name__} at {id(one):#x}": one for one in given}}
        return Surroundings(roots, self._optimizers, ignored)

    def _reach(self, modules: list[Any], form: Form) -> None:
        """Note the modules that the step reaches. If they are others now, only this form is known under their flags."""
        if list(map(id, modules)) != list(map(id, self._modules)):
            self._graphs.wait()
            for other in self._forms.values():
                if other is not form:
                    other.drop()
            self._modules, form.key = modules, (*form.key[:-1], tuple(map(_training, modules)))
            self._forms = {form.key: form}

    def _warn_of_forms(self) -> None:
        sizes = sorted({form.arguments for form in self._forms.values()})[:CAPTURED]
        self._tell(
            f"found more than {CAPTURED} forms of arguments ({', '.join(sizes)}), of which no more are captured; "
            "expected few: pad to a few sizes, and pass numbers as tensors. Others run as they are."
        )

    def _tell(self, words: str) -> None:
        """Warn once of each kind."""
        if (kind := words[:40]) not in self._told:
            self._told.add(kind)
            warn_user(words)

    def _changed(self, form: Form, graph: Recorded) -> tuple[str, bool]:
        """Return what is no longer as it was at the capture, in words, empty if all is; and if such changes count."""
        params, grads = graph.grads_before
        if not all(map(operator.is_, map(_grad_of, params), grads)):
            raise CaptureError(
                "found gradients that aren't those before the capture, of a backward outside of the step or zeroed "
                "otherwise, expected the same or none, as the graph reads those: zero them in the step, or before "
                "each call in the same way; with set_to_none=False where a backward outside of it adds to them."
            )
        if not form.copies.in_place():
            return "memory of a weight, a buffer or another tensor that the step reads", False
        if graph.surroundings.unchanged():
            return graph.settings.changed(), True
        now = self._look(graph.surroundings.ignored)
        if not (places := graph.surroundings.changes(now)):
            graph.surroundings = now  # other objects, of equal values
            return graph.settings.changed(), True
        if graph.settings.fixed.issuperset(places):
            raise CaptureError(
                f"found {places[0]} changed since the capture, {graph.surroundings.words(places[0], now)}, expected "
                "the same, since a graph keeps numbers: make it a tensor on the GPU and write to that (lr=torch.tensor("
                "1e-3, device='cuda'), fused=True), take an optimizer of ampcompile.optim, or call forget()."
            )
        self._reach(now.modules, form)
        return ", ".join(places[:3]), not places[0].startswith("state of")

    def _drop(self, form: Form, changed: str, counts: bool) -> None:
        """Forget a graph: its form is captured anew after a call as it is."""
        log.info("a captured step is captured anew, as this changed: %s (%s)", changed, form.arguments)
        self._params = _params_of(self._optimizers)
        form.copies = CapturedCopies(self._params)
        self._graphs.wait()
        form.drop()
        form.calls = self._warm_up - 1
        form.changes[changed] += counts
        if form.changes[changed] >= TOO_OFTEN:
            form.only_as_it_is = True
            warn_user(
                f"found {changed} changed for the third time between calls of a captured step, expected what stays: "
                "pass a tensor in its place, or write to one on the GPU (lr=torch.tensor(1e-3, device='cuda')). Calls "
                f"of {form.arguments} run as they are from now on."
            )

    def _call(self, run: Callable[..., Any], leaves: list[Any], structure: Any, within: Any, strict: bool) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, structure)

        def call() -> Any:
            with within:
                return self._step(*args, **kwargs)

        try:
            return run(call, strict)
        except RuntimeError as error:
            words = str(error)
            if isinstance(error, AmpError) or ("synchroniz" not in words and "captur" not in words):
                raise
            if "capturable is False" in words:
                raise CaptureError(
                    f"found an optimizer whose step is torch's own and has capturable=False ({words.splitlines()[0]}), "
                    "expected capturable=True, beside fused=True too: set it, or take one of ampcompile.optim."
                ) from error
            raise CaptureError(
                f"found an operation that waits for the GPU or can't be captured ({words.splitlines()[0]}), expected "
                "none in the step: the traceback above shows its line. Usual ones are .item(), a print of a tensor, "
                "and torch's own GradScaler around an optimizer that isn't fused."
            ) from error

    def _run(self, form: Form, leaves: list[Any], structure: Any, watched: bool = False, strict: bool = False) -> Any:
        """Call the step as it is. `strict`: with an error where the host would wait, until something is captured."""
        form.as_it_is += 1
        given = [self._moved(leaf) for leaf in leaves]
        within = form.copies.watched() if watched else contextlib.nullcontext()
        result = self._call(self._graphs.warm_up, given, structure, within, strict and not self._proven)
        for place, leaf in zip(given, leaves, strict=True):
            if place is not leaf and _version(place):
                leaf.copy_(place)
        return result

    def _moved(self, leaf: Any, copied: bool = False) -> Any:
        """An argument where the step takes it, or the graph reads it."""
        if not isinstance(leaf, Tensor) or not (copied or leaf.device.type != self._device.type):
            return leaf
        return leaf.detach().to(self._device, copy=copied, non_blocking=True).requires_grad_(leaf.requires_grad)

    def _replay(self, form: Form, leaves: list[Any], structure: Any) -> Any:
        graph: Any = form.graph
        if not self._on_gpu:
            return self._run(form, leaves, structure)
        _require_apart(leaves, graph.written)
        with torch.no_grad():
            for place, leaf in zip(graph.places, leaves, strict=True):
                if isinstance(place, Tensor):
                    place.copy_(leaf, non_blocking=True)
        graph.settings.write()
        form.copies.make_ready()
        try:
            self._graphs.replay(graph.graph)
            torch.autograd.graph.increment_version(self._params)
        finally:
            form.copies.note_replayed()
        form.replays += 1
        deque(map(setattr, graph.grads_after[0], repeat("grad"), graph.grads_after[1]), 0)
        graph.surroundings.set_back(graph.set_back)
        with torch.no_grad():
            for i in graph.written:
                leaves[i].copy_(graph.places[i])
        return graph.result

    def _capture(self, form: Form, leaves: list[Any], structure: Any, ran: list[Any]) -> Any:
        """Capture the step and replay it; without a GPU take it, put the result in `ran`, and check the same."""
        if self._on_gpu:
            for optimizer in self._optimizers:
                _require_capturable(optimizer)
            form.copies.make_fresh()
        places = [self._moved(leaf, copied=self._on_gpu) for leaf in leaves]
        settings, before = Settings(self._optimizers, self._device if self._on_gpu else None), self._look()
        if before.iterators:
            raise CaptureError(
                f"found {before.iterators[0]}, an iterator that the step reads, expected batches as arguments, since a "
                "replay runs no Python: call next() outside, and pass what it gives."
            )
        kept, stepped, drawn = list[Tensor](), list[tuple[Any, set[int]]](), self._drawn(before)
        grads, versions = list(map(_grad_of, self._params)), list(map(_version, places))
        grad_versions = list(map(_version, grads))
        try:
            with tables.kept_in(kept, settings.tables) as used:
                within, strict = self._noting(form, stepped), not self._proven
                graph, result = self._call(self._graphs.capture, places, structure, within, strict)
            if not self._on_gpu:
                ran.append(result)
            given = [id(optimizer.param_groups) for optimizer in self._optimizers]
            if not ({*used} <= {*settings.tables} and all(id(one.param_groups) in given for one, _ in stepped)):
                raise CaptureError(
                    "found a step of an optimizer that capture_step wasn't given, expected all that step, as replays "
                    "follow the settings and state of those: ampcompile.capture_step(step, first, second)."
                )
            sets = _only_set(before, self._look(), form.copies.inputs_read)
            if drawn != self._drawn(before):
                raise CaptureError(
                    "found random numbers that the host drew during the capture, of Python, NumPy or torch's CPU "
                    "generator, expected none, since a replay would repeat them: draw them outside and pass them, or "
                    "say draws_elsewhere=True if another thread does."
                )
            written = [i for i, version in enumerate(versions) if _version(places[i]) != version]
            _require_apart(leaves, written)
            if self._on_gpu and any(isinstance(one, Tensor) and one.is_leaf and one.grad is not None for one in places):
                raise CaptureError(
                    "found an argument that gets a gradient in the step, expected none, as it would not reach the "
                    "caller's tensor: return what torch.autograd.grad gives."
                )
        except BaseException:
            if self._on_gpu:
                form.copies.forget()
                deque(map(setattr, self._params, repeat("grad"), grads), 0)  # nothing ran: new ones hold no numbers
                before.set_back(before.changes(self._look()))
            raise
        settings.follow(before.named())
        now = self._look({*sets, *settings.names})
        self._reach(now.modules, form)
        read = set[int]().union(*(addresses for _, addresses in stepped), *(table.grads for table in settings.tables))
        around = _grads_around(self._params, grads, grad_versions, None if now.reads_gradients() else read - {0})
        if self._on_gpu:
            result = pytree.tree_map_only(Tensor, Tensor.detach, result)
        set_back = [name for name in sets if isinstance(now.found.get(name), Tensor)]
        form.graph = Recorded(graph, places, written, result, kept, settings, now, set_back, *around)
        form.copies.hold([value for value in now.found.values() if isinstance(value, Tensor)])
        self._proven, self.captured = True, self._on_gpu
        return self._replay(form, leaves, structure) if self._on_gpu else result

    @contextlib.contextmanager
    def _noting(self, form: Form, stepped: list[tuple[Any, set[int]]]) -> Iterator[None]:
        """Note what goes into the graph; and optimizers of torch's that step, with the addresses of all gradients."""
        hook = lambda one, *_: stepped.append((one, set(map(_address, map(_grad_of, self._params)))))
        with patches.before_steps(hook), form.copies.recorded() if self._on_gpu else contextlib.nullcontext():
            yield

    def _drawn(self, now: Surroundings) -> Any:
        """The states of the host's generators. On a CPU torch's is that of the parameters' device."""
        if self._draws_elsewhere:
            return None
        numpy = sys.modules.get("numpy")
        kind, key, place, *_ = ("", b"", 0) if numpy is None else numpy.random.get_state()
        torchs = self._on_gpu and torch.get_rng_state().tolist()
        return random.getstate(), kind, bytes(key), place, torchs, list(map(_state_of, now.generators))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    return generator.getstate() if isinstance(generator, random.Random) else str(generator._bit_generator.state)


def _grads_around(
    params: list[Tensor], before: list[Any], versions: list[int], read: Collection[int] | None
) -> tuple[tuple[list[Tensor], list[Any]], tuple[list[Tensor], list[Any]]]:
    """Parameters and gradients before the captured step, which it reads, or None where there was none; and those after.

    Others that were before it aren't among them: the step doesn't write them (`versions`: theirs before it), doesn't
    read them (`read`: addresses, None for all), and new ones have no history, with which they might be sums with those.
    """
    after = list(map(_grad_of, params))
    added = [
        a is None
        or a is b
        or read is None
        or _version(a) != version
        or _address(a) in read
        or getattr(b, "requires_grad", False)
        for a, b, version in zip(before, after, versions, strict=True)
    ]
    touched = [a is not None or b is not None for a, b in zip(before, after, strict=True)]
    read_before = list(compress(params, added)), list(compress(before, added))
    return read_before, (list(compress(params, touched)), list(compress(after, touched)))


def _kind(leaf: Any) -> tuple[Any, ...]:
    """An argument, as far as it belongs to the form of a call."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    if not isinstance(leaf, Hashable):  # it may change, or hold tensors, unseen
        raise CaptureError(
            f"found a {type(leaf).__qualname__} among the arguments, expected tensors, in tuples, lists and dicts, and "
            "what doesn't change, since a graph keeps what isn't a tensor: make tensors of it, as by torch.from_numpy, "
            "or pass the tensors that it holds."
        )
    return type(leaf), leaf


def _modes() -> tuple[Any, ...]:
    """What of torch's state a step runs under."""
    from ampcompile.torch_private import autocast  # loads Dynamo

    asked = autocast.is_on, torch.get_autocast_dtype, autocast.disabled_by_user
    regions = [ask(kind) for ask in asked for kind in ("cuda", "cpu")]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    grad_mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cudnn: Any = torch.backends.cudnn
    precision = torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision
    return *grad_mode, *regions, *deterministic, *precision, torch.get_default_dtype()


def _words(kinds: tuple[Any, ...]) -> str:
    """A form's arguments, for messages."""
    shown = [f"{str(kind[2])[6:]}{list(kind[1])}" if len(kind) > 2 else repr(kind[1]) for kind in kinds]
    return f"({', '.join(shown)})"


def _address(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_sparse else grad.data_ptr()


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def _require_apart(leaves: Sequence[Any], written: Sequence[int]) -> None:
    """Raise if an argument that the step writes shares memory with another one."""
    for i in written:
        own = storages.storage_address(leaves[i])
        for j, leaf in enumerate(leaves):
            if i != j and isinstance(leaf, Tensor) and storages.storage_address(leaf) == own:
                raise CaptureError(
                    "found two arguments that share memory, of which the step writes one, expected memory of its own "
                    "for each, as a graph reads copies: clone one."
                )


def _only_set(before: Surroundings, after: Surroundings, inputs: set[int]) -> list[str]:
    """Return what the step set without reading it; raise for what else it changed. `inputs`: ids of graphs' inputs."""
    changed = before.changes(after)
    for name in changed:
        old, new = before.found.get(name), after.found.get(name)
        plain = isinstance(old, PLAIN) or isinstance(new, PLAIN)
        read = isinstance(old, Tensor) and (id(old) in inputs or before.reads_first(name))
        if plain or read or not (before.is_attribute(name) or after.is_attribute(name)):
            raise CaptureError(
                f"found {name}, which the step itself changes, {before.words(name, after)}, expected it to stay, "
                "since a replay runs no Python: change it between the calls, keep it in a tensor that is written in "
                "place, or pass it as an argument."
            )
    return changed


def _params_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """All parameters; CaptureError if they aren't plain ones on one device."""
    params = [param for optimizer in optimizers for param in parameters(optimizer)]
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
    return params


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
def capture_step(
    step: Callable[..., Any], *optimizers: torch.optim.Optimizer, warm_up: int = 3, draws_elsewhere: bool = False
) -> CapturedStep:
    """Make one CUDA graph of a whole training step, loss scaling included; each call of the result is one step.

    `step` takes tensors (a batch), and does all of a step: forward, backward, clipping, update, `scaler.update()`,
    `zero_grad()`. `optimizers`: those that step in it. Each form of calls (shapes, types and other values of arguments;
    autocast and grad mode; which modules train; which parameters have gradients) has a graph. Its first `warm_up` calls
    run as they are; until some form is captured, the last of them raises an error where the host would wait. The next
    call captures; from then on the host only copies the inputs into place and replays the graph, whose results the next
    call overwrites. The graphs read kept copies of weights, in place. Between calls everything may go on as without a
    graph: weights that were written are cast, numbers that schedulers set are followed where the optimizer is ours, and
    attributes, hooks, closures, other settings and loaded state that changed lead to a new capture.

    What a graph needs is checked, and CaptureError says what is missing. `draws_elsewhere`: another thread draws random
    numbers of the host, which else are an error. On a CPU each call runs `step`, and the same is checked, but for
    counts and for waits other than `.item()`, `if tensor` and the like. `repr` lists the forms; `forget()` drops all
    graphs.

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
    return CapturedStep(step, optimizers, warm_up, draws_elsewhere)

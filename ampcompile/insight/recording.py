"""One run on file: what every op gave, as a few numbers each, and what the compiled call itself returned."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampcompile.about import VERSION
from ampcompile.compiler.ambient import autocast_for, device_type_of
from ampcompile.compiler.backend import rewrite
from ampcompile.compiler.lower import lower
from ampcompile.compiler.module_names import named
from ampcompile.dtypes import short_name
from ampcompile.errors import AuditError
from ampcompile.policy import Policy
from ampcompile.records.graphs import Numbers, OpRecord, plain
from ampcompile.torch_private import compiled_functions, pytree

from .call import Backend, MeasuredCall, Subject, preserve_state
from .exact import is_floating, relative_error
from .run import Session
from .show import error_text, show_progress, table, text_of

FORMAT = "ampcompile recording 3"
_DTYPES = {short_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class Returned:
    """An output of the call, or a gradient: its distance from the run in float64, relative."""

    ops: float
    """Of the ops run one by one."""
    call: float
    """Of the compiled call itself."""
    elements: int


@dataclass(frozen=True)
class Recording:
    """The result of `ampcompile.record`: numbers and names of one run, to `save` and `compare`. `str` is a table."""

    about: Mapping[str, str]
    """Versions, device and options."""
    steps: Sequence[OpRecord]
    """The inputs (their `op` is "input" and the name) and the ops that compute, in order, with `numbers`."""
    results: Mapping[str, Returned]
    """By name, as `output 0` and `gradient of head.weight`."""

    def __str__(self) -> str:
        steps = [
            (s.title, s.module, s.line, s.in_dtype, s.sizes, *map(error_text, (s.numbers.local, s.numbers.cumulative)))
            for s in self.steps
        ]
        results = [(name, error_text(result.ops), error_text(result.call)) for name, result in self.results.items()]
        headings = ["input or op", "module", "line", "dtype", "shape"]
        return text_of(
            [
                table(headings, ["alone", "from start"], steps),
                "",
                table(["result"], ["error by its ops", "of the call"], results),
            ]
        )

    def save(self, path: str | Path) -> None:
        """Write the recording as JSON, about 700 bytes for each op."""
        Path(path).write_text(json.dumps({"format": FORMAT} | plain(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote, as data alone. Raises AuditError for another file."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            if read["format"] != FORMAT:
                raise ValueError(read["format"])
            steps = [_read_step(step) for step in read["steps"]]
            return cls(read["about"], steps, {name: Returned(**r) for name, r in read["results"].items()})
        except (ValueError, KeyError, TypeError) as error:
            raise AuditError(
                f"found {path}, which is no recording that this version reads ({error}); expected a file written by "
                "ampcompile.record(model)(x).save(path). Record the run again."
            ) from error


def _read_step(read: dict[str, Any]) -> OpRecord:
    tuples = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
    return OpRecord(**read | tuples | {"dtype": _DTYPES[read["dtype"]], "numbers": Numbers(**read["numbers"])})


def record_call(subject: Subject, settings: dict[str, Any], compiled: Any, args: Any, kwargs: Any) -> Recording:
    """Run a call as `compiled`, or else compiled anew, or run eagerly; then op by op."""
    if settings["eager"]:
        subject = replace(subject, options=replace(subject.options, policy=Policy()))  # ours, not autocast's
    call = MeasuredCall(subject, args, kwargs, **settings)
    returned = _results_of(call, compiled)  # first: the other run has copies of weights cast again
    with show_progress("recording") as say:
        session = Session(fingerprints=True, progress=say)
        results = {
            name: Returned(relative_error(mixed, exact), relative_error(returned[name], exact), exact.numel())
            for name, (mixed, exact) in call.run(session).items()
            if name in returned and returned[name].shape == exact.shape
        }
    return Recording(_about(call), session.ops, results)


def _about(call: MeasuredCall) -> dict[str, str]:
    device_type = device_type_of(None, call.args, call.kwargs)
    device = torch.cuda.get_device_name() if device_type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "callable": named(call.subject.f),
        "recorded": str(date.today()),
        "torch": torch.__version__,
        "ampcompile": VERSION,
        "machine": f"{platform.system()} {platform.machine()}, {device_type} {device}",
        "run": "eager autocast" if call.eager else "compiled",
    } | {f"option {name}": str(value) for name, value in vars(call.subject.options).items()}


def _results_of(call: MeasuredCall, compiled: Any) -> dict[str, Tensor]:
    """Return outputs, and gradients of parameters, of the call itself."""
    subject, options, (args, kwargs) = call.subject, call.subject.options, (call.args, call.kwargs)
    backend = Backend(options, lambda gm, x: lower(rewrite(gm, x, options).graph, x, options), options)
    anew = compiled is None or call.eager
    state: Any = subject.set_apart(args, kwargs, backend) if anew else preserve_state(subject.f, args, kwargs)
    with state as made:
        compiled_functions.start_from(call.random_state)
        if call.eager:
            with autocast_for(device_type_of(None, args, kwargs), options):
                result = subject.f(*args, **kwargs)
        else:
            result = (made if anew else compiled)(*args, **kwargs)
        call.differentiate(result, lambda loss: loss)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if is_floating(leaf)]
        outputs = {f"output {i}": leaf.detach() for i, leaf in enumerate(leaves)}
        return outputs | {f"gradient of {name}": p.grad for name, p in call.named_parameters() if p.grad is not None}

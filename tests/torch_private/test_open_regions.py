"""A region with `enabled=False` counts where somebody asked for it, for its own device and in its own thread."""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import ampcompile.backend  # noqa: F401  patches torch
from ampcompile.torch_private import autocast
from ampcompile.torch_private.autocast import autocast_nesting, autocast_states, disabled_by_user
from tests.injecting import raised_at

Region = Callable[[], AbstractContextManager[Any]]
DISABLED = functools.partial(torch.autocast, "cpu", enabled=False)
ENABLED = functools.partial(torch.autocast, "cpu")
OF_ANOTHER = functools.partial(torch.autocast, "cuda", enabled=False)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not disabled_by_user("cpu") and not autocast._thread.open and not autocast_nesting()


def in_a_thread(act: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own, of whose regions nothing is known yet."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(act()))
    thread.start()
    thread.join()
    return returned[0]


@pytest.mark.parametrize(
    ("regions", "for_cpu", "for_cuda"),
    [
        ([], False, False),
        ([DISABLED], True, False),
        ([ENABLED], False, False),
        ([OF_ANOTHER], False, True),
        ([DISABLED, OF_ANOTHER], True, True),
        ([OF_ANOTHER, DISABLED], True, True),
        ([ENABLED, OF_ANOTHER], False, True),
        ([DISABLED, ENABLED], False, False),
        ([ENABLED, DISABLED], True, False),
        ([functools.partial(torch.autocast, "cpu", torch.float16, False)], True, False),
    ],
)
def test_the_innermost_region_of_a_device_decides(regions: list[Region], for_cpu: bool, for_cuda: bool) -> None:
    with ExitStack() as stack:
        for region in regions:
            stack.enter_context(region())
        assert (disabled_by_user("cpu"), disabled_by_user("cuda")) == (for_cpu, for_cuda)


def test_a_region_of_a_subclass_counts() -> None:
    class Own(torch.autocast):
        def __enter__(self) -> Any:
            return super().__enter__()

    with Own("cpu", enabled=False):
        assert disabled_by_user("cpu")
    with pytest.warns(FutureWarning, match="deprecated"):
        deprecated = torch.cpu.amp.autocast(enabled=False)
    with deprecated:
        assert disabled_by_user("cpu")


def test_regions_that_an_error_leaves_open_are_forgotten() -> None:
    with torch.autocast("cpu", torch.float16):
        before = autocast_states(), autocast_nesting()
        with pytest.raises(KeyError), autocast.state_restored():
            torch.set_autocast_dtype("cpu", torch.bfloat16)
            DISABLED().__enter__()
            assert disabled_by_user("cpu")
            raise KeyError
        assert not disabled_by_user("cpu") and (autocast_states(), autocast_nesting()) == before


def test_regions_may_end_in_any_order() -> None:
    first, second, third = DISABLED(), OF_ANOTHER(), DISABLED()
    for region in (first, second, third):
        region.__enter__()
    first.__exit__(None, None, None)
    assert disabled_by_user("cpu") and disabled_by_user("cuda")
    third.__exit__(None, None, None)
    assert not disabled_by_user("cpu") and disabled_by_user("cuda")
    second.__exit__(None, None, None)


def test_one_region_may_be_open_several_times() -> None:
    @DISABLED()
    def call_itself(times: int) -> bool:
        return disabled_by_user("cpu") and (times == 0 or (call_itself(times - 1) and disabled_by_user("cpu")))

    assert call_itself(3) and not disabled_by_user("cpu")
    region = DISABLED()
    with region:
        assert in_a_thread(lambda: (disabled_by_user("cpu"), region.__enter__() and disabled_by_user("cpu"))) == (0, 1)
        assert disabled_by_user("cpu")
    assert not disabled_by_user("cpu")


ENTER, EXIT = (getattr(torch.autocast, name).__wrapped__ for name in ("__enter__", "__exit__"))


def test_a_region_from_before_the_patches_counts_unless_autocast_is_on_somewhere() -> None:
    def act() -> list[bool]:
        region = DISABLED()
        ENTER(region)
        found = [disabled_by_user("cpu")]
        for other in (ENABLED, functools.partial(torch.autocast, "mps", torch.float16)):
            with other():
                found.append(not disabled_by_user("cpu"))
        found.append(disabled_by_user("cpu"))
        EXIT(region, None, None, None)
        with OF_ANOTHER():
            return [*found, not disabled_by_user("cpu")]

    assert all(in_a_thread(act))


class OnTheWayBack(torch.autograd.Function):
    """Notes in backward whether float32 is asked for, as in forward."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        OnTheWayBack.seen = [disabled_by_user("cpu")]
        return x.clone()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        OnTheWayBack.seen.append(disabled_by_user("cpu"))
        return gradient


class OfFloat32(OnTheWayBack):
    """The same, but forward runs without autocast, if it was on."""

    forward = staticmethod(
        torch.amp.custom_fwd(OnTheWayBack.forward.__wrapped__, device_type="cpu", cast_inputs=torch.float32)
    )


@pytest.mark.parametrize("function", [OnTheWayBack, OfFloat32])
@pytest.mark.parametrize("around_backward", [nullcontext, DISABLED, ENABLED])
@pytest.mark.parametrize("around", [nullcontext, DISABLED, ENABLED])
def test_the_backward_of_custom_fwd_is_asked_for_what_forward_was(
    function: Any, around: Region, around_backward: Region
) -> None:
    with around():
        y = function.apply(torch.ones(2, requires_grad=True))
    with around_backward():
        y.sum().backward()
    assert OnTheWayBack.seen == 2 * [around is DISABLED or (function is OfFloat32 and around is ENABLED)]


def test_regions_are_what_they_are_without_the_patches() -> None:
    region = DISABLED()
    with region as entered:
        assert entered is region and not torch.is_autocast_enabled("cpu") and autocast_nesting() == 1
        copy.deepcopy(region)
    assert vars(region).keys() == vars(copy.deepcopy(region)).keys()
    assert torch.autocast.__enter__.__name__ == "__enter__" and torch.autocast.__exit__.__doc__ == EXIT.__doc__


def test_an_interrupt_leaves_a_region_either_open_or_not() -> None:
    """What torch itself leaves open counts as open."""

    def act() -> None:
        with DISABLED():
            pass

    at = 1
    while raised_at(at, KeyboardInterrupt, act):
        nesting, entries = autocast_nesting(), autocast._thread.open
        assert nesting == len(entries) and disabled_by_user("cpu") is (nesting > 0)
        for region, *_ in entries:
            region.__exit__(None, None, None)
        at += 1
    assert at > 2

"""Stand-ins for the GPU that torchtitan asks for. Nothing in this file concerns precision, or is needed with GPUs."""

import os
import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def pretend() -> None:
    """Give the CPU what torchtitan asks of an accelerator. Call it before torchtitan is imported.

    It asks torch which accelerator there is, and without one takes CUDA; it numbers devices by `LOCAL_RANK`, and reads
    their memory statistics; it sets factors of gradients that gloo can't multiply by while it sums.
    """
    os.environ["LOCAL_RANK"] = "0"
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    answers: dict[Any, dict[str, Any]] = {
        torch._utils: {"_get_available_device_type": lambda: "cpu"},
        torch.cpu: {
            "current_device": lambda: 0,
            "get_device_name": lambda device: "CPU",
            "get_device_properties": lambda device: types.SimpleNamespace(total_memory=1),
            "memory_stats": lambda device: {},
            "reset_peak_memory_stats": lambda: None,
            "empty_cache": lambda: None,
        },
        FSDPModule: {"set_gradient_divide_factor": set_factor_and_sum},
    }
    for owner, named in answers.items():
        for name, answer in named.items():
            setattr(owner, name, answer)

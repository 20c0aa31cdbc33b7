"""Events of a profile, made by hand as torch's profiler gives them, are added up by what they are."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import DeviceType

from ampcompile.optim import AdamW
from ampcompile.timing.trace import CASTS, PRODUCTS, REST, STEP, Memory, record, record_memory, sort_events


def event(name: str, start: float, end: float, gpu: bool = False, thread: int = 1, **more: Any) -> SimpleNamespace:
    """Times in microseconds."""
    device = DeviceType.CUDA if gpu else DeviceType.CPU
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, thread=thread, device_type=device, **more)


GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
STEP_REGION = "Optimizer.step#AdamW.step"
TRACE = [
    event("aten::mm", 0, 900),
    event("cudaLaunchKernel", 5, 10),
    event(STEP_REGION, 1000, 1400),
    event("mine", 0, 2000, is_user_annotation=True),
    event(GEMM, 100, 200, gpu=True),
    event("triton_poi_fused__to_copy_3", 200, 230, gpu=True),
    event("triton_poi_fused_addmm_gelu_0", 220, 260, gpu=True),  # beside the one before, on another stream
    event("amp_check_grads", 300, 320, gpu=True),
    event(STEP_REGION, 350, 450, gpu=True),  # the annotation, on the GPU's line
    event("vectorized_elementwise_kernel", 350, 400, gpu=True),  # of the step, as it runs in the annotation
    event("amp_adam", 410, 450, gpu=True),
    event("Memcpy DtoD (Device -> Device)", 460, 470, gpu=True),
    event("mine", 100, 470, gpu=True),
    event("theirs", 100, 470, gpu=True, is_user_annotation=True),
]


def test_kernels_are_sorted_and_annotations_left_out() -> None:
    trace = sort_events(TRACE, elapsed=2e-3, calls=2)
    expected = {PRODUCTS: 50e-6, CASTS: 15e-6, STEP: 55e-6, REST: 25e-6}
    assert trace.seconds == pytest.approx(expected)
    assert trace.total == pytest.approx(145e-6) and trace.launches == 3.5
    assert trace.busy == pytest.approx(140e-6), "two kernels at once are busy once"
    assert sort_events(TRACE, elapsed=9.0, calls=2) == trace, "the host's time isn't the GPU's"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)", PRODUCTS),
        ("void pytorch_flash::flash_fwd_kernel<...>", PRODUCTS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", PRODUCTS),
        ("void cudnn::bn_fw_tr_1C11_kernel", PRODUCTS),
        ("triton_tem_fused_addmm_1", PRODUCTS),
        ("triton_red_fused_convolution_backward_2", REST),
        ("triton_per_fused__to_copy_native_layer_norm_12", REST),
        ("triton_poi_fused__to_copy_t_view_12", CASTS),
        ("triton_poi_fused_clone_4", CASTS),
        ("void at::native::bfloat16_copy_kernel_cuda", REST),
        ("amp_cast", CASTS),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", REST),
        ("amp_update_scale", STEP),
        ("triton_poi_fused_add_0", REST),
    ],
)
def test_a_kernels_name_says_what_it_does(name: str, kind: str) -> None:
    trace = sort_events([event(name, 0, 10, gpu=True)], elapsed=1.0)
    assert [each for each, seconds in trace.seconds.items() if seconds] == [kind]


def test_a_hosts_spans_count_once_and_by_thread() -> None:
    trace = sort_events(
        [
            event("aten::linear", 0, 100),
            event("aten::addmm", 10, 90),  # in the linear
            event("aten::_to_copy", 100, 150),
            event("aten::relu", 150, 200),
            event("amp: GradScaler.step", 200, 400),
            event(STEP_REGION, 210, 390),
            event("aten::mm", 300, 350),  # in the step
            event("amp: refresh copies of weights", 400, 430),
            event("ampcompile::packed_linear", 410, 440, thread=2),
            event("aten::convert_element", 440, 450),
        ],
        elapsed=1e-3,
    )
    assert trace.seconds == pytest.approx({PRODUCTS: 130e-6, CASTS: 80e-6, STEP: 200e-6, REST: 590e-6})
    assert (trace.busy, trace.launches) == (0, 0) and trace.total == pytest.approx(1e-3)


def test_a_real_profile_has_products_on_this_cpu() -> None:
    a = torch.randn(256, 256)
    trace = record(lambda: [a @ a, a.sin()])
    assert trace.seconds[PRODUCTS] > 0 < trace.seconds[REST] and trace.seconds[STEP] == 0


@pytest.mark.gpu
def test_a_real_profile_of_a_gpu() -> None:
    a, x = torch.randn(2048, 2048, device="cuda"), torch.randn(4, device="cuda")
    with torch.profiler.record_function("mine"):
        trace = record(lambda: [a @ a, *[x.add_(1) for _ in range(5)]])
    assert 6 <= trace.launches <= 7 and trace.seconds[PRODUCTS] > trace.seconds[REST] > 0
    assert 0 < trace.busy <= trace.total
    assert 1e-3 < record(lambda: torch.cuda._sleep(20_000_000)).busy < 1


def test_memory_is_counted_beside_tensors_without_any_and_unmade_optimizers() -> None:
    param = torch.nn.Parameter(torch.ones(1000))
    others = [torch.nn.Parameter(torch.eye(3).to_sparse()), torch.nn.Parameter(torch.empty(10**9, device="meta"))]
    optimizer, unmade = torch.optim.SGD([param], lr=0.1, momentum=0.9), object.__new__(torch.optim.SGD)
    with FakeTensorMode():
        others.append(torch.nn.Parameter(torch.empty(10**9)))

    def step() -> None:
        param.square().sum().backward()
        optimizer.step()

    step()
    found = record_memory(step)
    assert all(4000 <= found.held[kind] < 10**9 for kind in ("weights", "gradients", "states"))
    assert found.made >= 4000 and len(others) == 3 and unmade is not None

    def first_step() -> None:
        param.exp().sum().backward()
        torch.optim.AdamW([param]).step()

    found = record_memory(first_step)
    assert found.phase == "step" and found.kept >= 4000 and 'saved="fp8"' not in found.less


def test_what_options_take_off_is_what_they_take_off_when_they_are_set() -> None:
    """By states in 8 bits to the byte, by 16-bit parameters but for their checksums: 4 bytes for 128 numbers."""

    def measure(dtype: torch.dtype = torch.float32, **options: Any) -> Memory:
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 64)).to(dtype)
        compiled = torch.compile(model, backend="amp", options={"lower": "aot_eager", "dtype": torch.bfloat16})
        optimizer, x = AdamW(model.parameters(), lr=1e-3, **options), torch.randn(8, 128, dtype=dtype)

        def step() -> None:
            compiled(x).square().mean().backward()
            optimizer.step()

        step()
        gc.collect()
        return record_memory(step)

    plain, numbers = measure(), 128 * 256 + 256 + 256 * 64 + 64
    for option, checksums, other in (
        ('states="8bit"', 0, measure(states="8bit")),
        ('masters="remainder8"', numbers // 32, measure(torch.bfloat16, masters="remainder8")),
    ):
        taken = sum(plain.held.values()) - sum(other.held.values())
        assert checksums <= plain.less[option] - taken <= checksums + 8
    copies = plain.held["copies"] if plain.phase == "step" else 0
    assert plain.less.get('weights="every_call"', 0) == copies
    assert plain.less.get('saved="fp8"', 0) == (0 if plain.phase == "step" else plain.kept // 2)

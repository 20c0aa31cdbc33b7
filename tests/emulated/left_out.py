"""The tests marked gpu that don't run on the made-up GPU, and why; by the beginning of their names."""

LEFT_OUT = {
    "tests/scaler/test_gpu.py::test_a_tensor_of_more_than_two_to_the_32_elements": (
        "needs 60 GB, and hours at the emulator's speed"
    ),
    "tests/scaler/test_torchs_tests.py::test_grad_scaling_unscale_sparse": "it has no sparse tensors",
    "tests/timing/test_step_profile.py::test_graphs_are_tried_on_a_gpu": "torch's profiler times no device here",
    "tests/timing/test_trace.py::test_a_real_profile_of_a_gpu": "torch's profiler traces no device here",
    "tests/behaviour/test_cuda_graphs.py::test_fsdp2_by_block": "needs NCCL, which CPU builds of torch lack",
}

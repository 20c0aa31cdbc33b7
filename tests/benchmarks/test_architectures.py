"""Every architecture has its known size, is the same at each call, and learns from its own inputs."""

import pytest
import torch

from benchmarks.architectures import SHAPES, SMALL, TINY, build

NAMES = ["GPT 23M", *SHAPES, *SMALL, "UNet"]


@pytest.mark.parametrize(
    "name, side, millions", [("BERT", 16, 110), ("ViT", 224, 86.6), ("ResNet-50", 224, 25.6), ("T5", 16, 60.5)]
)
def test_sizes_are_those_of_the_papers(name: str, side: int, millions: float) -> None:
    with torch.device("meta"):
        model, _ = build(name, 1, side, training=False)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * millions, rel=0.02)


def test_wide_llamas_have_the_shapes_that_a_gpu_is_measured_on() -> None:
    with torch.device("meta"):
        small, large = (build(f"Llama d{width}", 1, 8, training=False)[0] for width in (2048, 4096))
    assert [len(model.model.model.layers) for model in (small, large)] == [4, 2]
    assert large.model.model.layers[0].mlp.up_proj.weight.shape == (14336, 4096)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients(name: str) -> None:
    model, inputs = build(TINY + name, 2, 32, training=True)
    loss = model(*inputs)
    assert loss.dim() == 0 and loss.isfinite()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) > len(list(model.parameters())) / 2
    assert all(grad.isfinite().all() for grad in grads) and any(grad.any() for grad in grads)


@pytest.mark.parametrize("name", [*NAMES, "5 weights"])
def test_every_process_gets_the_same(name: str) -> None:
    outputs = []
    for _ in range(2):
        torch.rand(3)  # whatever came before
        model, inputs = build(TINY + name, 2, 32, training=False)
        outputs.append(model(*inputs))
    assert torch.equal(*outputs)
    assert outputs[0].shape[0] == 2 and outputs[0].std() > 0


def test_shapes_in_names() -> None:
    model, _ = build("GPT 3x128", 1, 8, training=False)
    assert (model.config.layers, model.config.width) == (3, 128)
    assert len(list(build("7 weights", 1, 1, training=False)[0].parameters())) == 7

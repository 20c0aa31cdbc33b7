"""Methods compiled one by one have eager autocast's bits, and their module stays what it was."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import OptionError
from tests.compiling import LOW, eager, same_bits

OPTIONS = {"lower": "aot_eager", "outputs": "autocast"}


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("scale", torch.ones(8))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, z: Tensor, *, times: int = 1) -> Tensor:
        """From code to number."""
        return self.decoder(z) * times

    def sample(self) -> Tensor:
        return self.decoder.weight @ self.decoder.weight.mT

    def repeat(self, x: Tensor) -> Tensor:
        return self(self(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x), times=2)

    @torch.compile(backend="amp", options=OPTIONS)
    def compiled_by_its_class(self, x: Tensor) -> Tensor:
        return self.encode(x)

    @property
    def size(self) -> int:
        return 4

    @staticmethod
    def helper(x: Tensor) -> Tensor:
        return x


class Noisy(Autoencoder):
    def decode(self, z: Tensor, *, times: int = 1) -> Tensor:
        return super().decode(z + 1, times=times)


@pytest.mark.parametrize("kind", [Autoencoder, Noisy])
def test_methods_have_eager_autocasts_bits(kind: type[Autoencoder]) -> None:
    model, other, x = kind(), kind(), torch.randn(3, 8)
    expected = [eager(f, *args) for f, *args in ((model.encode, x), (model.decode, x[:, :4]), (model.sample,))]
    ampcompile.compile_methods(model, "encode", "decode", "sample", **OPTIONS)
    assert same_bits([model.encode(x), model.decode(x[:, :4]), model.sample()], expected)
    assert same_bits(other.encode(x), other.encoder(x)), "only the object changes"
    with torch.no_grad():
        model.encoder.weight.zero_()
    assert same_bits(model.encode(x), model.encoder.bias.expand(3, 4).to(LOW))


def test_options_are_those_of_torch_compile_and_of_the_module() -> None:
    model, x = Autoencoder(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="amp", options={**OPTIONS, "dtype": torch.float16})
    ampcompile.compile_methods(compiled, "encode")
    ampcompile.compile_methods(compiled, "decode", dtype=LOW, policy="module decoder=fp32")
    assert same_bits(compiled.encode(x), eager(model.encoder, x, dtype=torch.float16))
    assert same_bits(compiled.decode(x[:, :4]), model.decoder(x[:, :4]))
    del model.encode
    ampcompile.compile_methods(compiled, "encode", dtype=LOW)
    assert same_bits(compiled.encode(x), eager(model.encoder, x, dtype=LOW)), "what is named here beats the module's"
    model.compile(backend="eager")
    ampcompile.compile_methods(model, "sample")
    assert model.sample().dtype == torch.float32
    with pytest.raises(OptionError, match="'dtyp' is unknown"):
        ampcompile.compile_methods(model, "repeat", dtyp=LOW)
    assert "repeat" not in vars(model)


def test_module_compile_compiles_what_a_method_calls_by_self() -> None:
    model, x = Autoencoder(), torch.randn(3, 8)
    expected = eager(model.repeat, x)
    model.compile(backend="amp", options=OPTIONS)
    assert same_bits(model.repeat(x), expected)


@pytest.mark.parametrize("backend", ["amp", "eager"])
def test_a_compiled_method_inside_what_is_compiled_is_part_of_its_graph(backend: str) -> None:
    model, x = Autoencoder(), torch.randn(3, 8)
    expected = eager(model, x)
    ampcompile.compile_methods(model, "encode", "decode", **OPTIONS)
    if backend == "amp":
        run = torch.compile(model, backend=backend, fullgraph=True, options=OPTIONS)
        assert same_bits(run(x), expected)
        model.compile(backend=backend, fullgraph=True, options=OPTIONS)
        assert same_bits(model(x), expected)
    else:
        with pytest.warns(ampcompile.AmpWarning, match="called inside a function that another backend compiles"):
            assert torch.compile(model, backend=backend, fullgraph=True)(x).dtype == torch.float32
    assert same_bits(eager(model, x), expected), "called in eager code"


def test_a_compiled_method_is_trained_and_explained() -> None:
    model, x = Autoencoder(), torch.randn(3, 8)
    eager(model.encode, x).sum().backward()
    expected, model.encoder.weight.grad = model.encoder.weight.grad, None
    ampcompile.compile_methods(model, "encode", **OPTIONS)
    model.encode(x).sum().backward()
    assert same_bits(model.encoder.weight.grad, expected)
    report = ampcompile.explain(model.encode)(x)
    assert [cast.op for cast in report.casts if "hoisted" in cast.fate] == ["aten.linear", "aten.linear"]
    assert ampcompile.explain(model)(x).casts and ampcompile.audit(model)(x).error < 0.1


def test_the_module_stays_what_it_was() -> None:
    model = Autoencoder()
    state, shown = list(model.state_dict()), repr(model)
    ampcompile.compile_methods(model, "encode", "decode", **OPTIONS)
    assert list(model.state_dict()) == state and repr(model) == shown
    assert inspect.signature(model.decode) == inspect.signature(Autoencoder().decode)
    assert model.decode.__doc__ == "From code to number." and model.decode.__self__ is model
    del model.encode
    del torch.compile(model, backend="amp").decode
    assert "encode" not in vars(model) and "decode" not in vars(model), "the way back"


def unpickled(model: nn.Module) -> Any:
    pickled = pickle.dumps(model)
    assert b"ampcompile" not in pickled
    return pickle.loads(pickled)


@pytest.mark.parametrize("copied", [lambda model: copy.deepcopy(copy.deepcopy(model)), unpickled])
def test_copies_have_the_methods_of_their_class(copied: Callable[[nn.Module], Any]) -> None:
    model, x = Autoencoder(), torch.randn(3, 8)
    ampcompile.compile_methods(model, "encode", "decode", **OPTIONS)
    other = copied(model)
    with torch.no_grad():
        model.encoder.weight.zero_()
    assert other.encode.__self__ is other and same_bits(other.encode(x), other.encoder(x)) and other.encode(x).any()
    ampcompile.compile_methods(other, "encode", **OPTIONS)
    assert same_bits(other.encode(x), eager(other.encoder, x))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decod", "found 'decod', expected the name of a method of Autoencoder. Did you mean 'decode'"),
        (["encode"], r"found \['encode'\], expected the name of a method"),
        ("forward", r"expected another method: module.compile\(backend='amp'\) compiles forward"),
        ("state_dict", "found 'state_dict' of Autoencoder, a method; expected a method that the class defines"),
        ("encoder", r"found 'encoder' of Autoencoder, a Linear; .* module.encoder.compile\(backend='amp'\)"),
        ("compiled_by_its_class", "found 'compiled_by_its_class' of Autoencoder compiled already"),
        ("sample", "found 'sample' of Autoencoder compiled already, .*: `del module.sample` undoes"),
        ("size", "found 'size' of Autoencoder, a int; expected a method that the class defines"),
        ("helper", "found 'helper' of Autoencoder, a function; expected a method"),
        ("own", "found 'own' of Autoencoder, a function; expected a method"),
    ],
)
def test_what_is_no_method_to_compile_is_refused(name: str, message: str) -> None:
    model = Autoencoder()
    model.own = lambda x: x
    ampcompile.compile_methods(model, "sample", **OPTIONS)
    with pytest.raises(OptionError, match=message):
        ampcompile.compile_methods(model, "encode", name)
    assert "encode" not in vars(model), "nothing is compiled then"
    for given, told in ((Autoencoder, "found the class Autoencoder, expected a module"), (print, "found 'builtin_")):
        with pytest.raises(OptionError, match=told):
            ampcompile.compile_methods(given, "encode")
    with pytest.raises(OptionError, match="found no name of a method, expected some"):
        ampcompile.compile_methods(Autoencoder())

"""One g++ compiles all of Inductor's C++ kernels of a graph, where Inductor runs one for each.

Of a kernel's 0.7 seconds half goes to what Inductor's headers hold, and to a linker that reads libtorch; the suite has
more than a thousand kernels. Each keeps its code, its flags and its bindings, in a namespace of its own. Processes that
tests start compile as users' do.
"""

import hashlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings
from torch._inductor.codecache import cache_dir
from torch._inductor.cpu_vec_isa import pick_vec_isa

INCLUDE = re.compile(r"^[ \t]*#[ \t]*include .*\n", re.MULTILINE)
LIBRARY = """
static struct PyModuleDef kernels = {{PyModuleDef_HEAD_INIT, "kernel", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_kernel(void) {{
    PyObject* module = PyModule_Create(&kernels);
    {kernels}
    return module;
}}
"""
KERNEL = """
namespace {name} {{
#define kernel kernel_{name}
#define PyInit_kernel PyInit_{name}
{code}
#undef kernel
#undef PyInit_kernel
}}
"""


class Kernel:
    """What Inductor's module holds between the definition of a kernel and `wait`."""

    def __init__(self, argtypes: list[str], source: str) -> None:
        arguments = (f"parse_arg<{argtype.replace('const ', '')}>(args, {n})" for n, argtype in enumerate(argtypes))
        self.code = source + Bindings.suffix_template.format(
            arg_len=len(argtypes),
            call_entry_func=Bindings.call_entry_function.format(", ".join(arguments)),
            entry_func=Bindings.entry_function,
            extra_parse_arg="",
        )
        flags = {key: value for key, value in config.get_config_copy().items() if key.startswith("cpp.")}
        said = f"{torch.__version__} {pick_vec_isa()} {flags} {self.code}"
        self.name = "k" + hashlib.sha256(said.encode()).hexdigest()[:32]

    @property
    def known(self) -> Path:
        """A file that names the library of an earlier graph, or run, that has this kernel."""
        return Path(cache_dir()) / "one_library" / self.name


loaded: dict[str, Any] = {}
"""The functions of this process, by their kernels' names."""
inductor_waits = AsyncCompile.wait


def install() -> None:
    AsyncCompile.cpp_pybinding = lambda self, argtypes, source_code: Kernel(argtypes, source_code)
    AsyncCompile.wait = wait


def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
    held = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
    asked = {kernel.name: kernel for kernel in held.values() if kernel.name not in loaded}
    for name, kernel in list(asked.items()):
        if kernel.known.exists() and Path(library := kernel.known.read_text()).exists():
            take([asked.pop(name)], Bindings._load_library_inner(library, Path(library).stem))
    if asked:
        module = Bindings.load_async(one_source([*asked.values()]))()
        take([*asked.values()], module)
        for kernel in asked.values():
            kernel.known.parent.mkdir(exist_ok=True)
            kernel.known.write_text(module.__file__)
    scope.update({name: loaded[kernel.name] for name, kernel in held.items()})
    inductor_waits(self, scope)


def take(kernels: list[Kernel], module: ModuleType) -> None:
    loaded.update({kernel.name: getattr(module, kernel.name).kernel for kernel in kernels})


def one_source(kernels: list[Kernel]) -> str:
    """Headers first: none may be read within a namespace."""
    headers = dict.fromkeys(line for kernel in kernels for line in INCLUDE.findall(kernel.code))
    spaces = [KERNEL.format(name=kernel.name, code=INCLUDE.sub("", kernel.code)) for kernel in kernels]
    added = (f'PyModule_AddObject(module, "{k.name}", {k.name}::PyInit_{k.name}());' for k in kernels)
    return "".join(["\n", *headers, *spaces, LIBRARY.format(kernels="\n    ".join(added))])

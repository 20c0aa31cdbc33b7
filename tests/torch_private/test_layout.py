"""Private names of torch and changes of torch stand in ampcompile/torch_private, by the syntax trees of all files."""

import ast
import re

from tests.test_layout import SOURCES, room, tree

# Attributes that torch reads on functions, graphs and modules of ours or of the user's; setting them changes no torch.
MARKS = {
    "__class__",
    "_boxed_call",
    "_dynamo_marked_constant",
    "_dynamo_source",
    "_opt_called",
    "_param_name_to_source",
    "_torchdynamo_inline",
    "_torchdynamo_wrapper_id",
}
# What adds to torch's own tables and lists.
REGISTRARS = {
    "addHandler",
    "py_impl",
    "register_bytecode_hook",
    "register_lowering",
    "register_op_impl",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
}


def torch_names(code: ast.AST) -> dict[str, str]:
    """What a file's names stand for, those that it imports from torch."""
    found = {}
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found |= {alias.asname: alias.name} if alias.asname else {first: first}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in found.items() if full.split(".")[0] in ("torch", "functorch")}


def root(node: ast.AST) -> str:
    """The first name of `a.b().c[d]`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(code: ast.AST) -> set[str]:
    """The private names of torch in a file: imported, written out with dots, or in a string that is nothing else."""
    bound, found = torch_names(code), set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", dotted := ast.unparse(node)):
            first, _, rest = dotted.partition(".")
            found |= {f"{bound[first]}.{rest}"} if first in bound else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value}
    found = {name for name in found if not name.startswith("torch.ops.")}  # ops bear the names of their schemas
    return {name for name in found if re.fullmatch(r"torch(\.\w+)*[.:]_(?!_)[\w.:]*|functorch(\.\w+)*", name)}


def changes_of_torch(code: ast.AST) -> set[str]:
    """Assignments to attributes of torch's objects in a file, also by `setattr`, and calls of `REGISTRARS`."""
    bound, found = torch_names(code), set()
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            first = root(node)
            private = node.attr.startswith("_") and first != "self" and node.attr not in MARKS
            if first in bound or private:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            owner, name = node.args[:2]
            if root(owner) in bound or isinstance(name, ast.Constant):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call):
            if {getattr(node.func, "id", ""), getattr(node.func, "attr", "")} & REGISTRARS:
                found.add(ast.unparse(node.func))
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} & REGISTRARS
    return found


def test_private_names_of_torch_and_patches_stand_in_their_place() -> None:
    for module in SOURCES:
        if room(module)[1] != "torch_private":
            assert not private_names(tree(module)), f"{module}: ask a module of ampcompile/torch_private for it"
        if module != "ampcompile.torch_private.patches":
            assert not changes_of_torch(tree(module)), f"{module}: ampcompile/torch_private/patches.py changes torch"

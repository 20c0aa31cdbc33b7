"""Each message that docs/troubleshooting.md quotes in a heading stands in our sources, or is known to be another's."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"

OTHERS = {  # what torch, NumPy and Accelerate say
    "Invalid backend: 'amp', …",  # newer releases suggest names in between
    "'AMP' is not a valid DynamoBackend",
    "Error in op: torch.ops.aten._transformer_encoder_layer_fwd",
    "Either mode or options can be specified, but both can't be specified at the same time.",
    "mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
    "expected scalar type Float but found Half",
    "Index put requires the source and destination dtypes match, got Float for the destination and BFloat16 for the "
    "source.",
    "Got unsupported ScalarType BFloat16",
    "one of the variables needed for gradient computation has been modified by an inplace operation",
    "torch.compile with aot_autograd does not currently support double backward",
    "… failed with aten.nonzero.default. Adding a graph break.",
    "torch._dynamo hit config.recompile_limit",
}


def texts() -> str:
    """All string constants of the sources: those of one f-string joined by "…", the others by line ends."""
    found = []
    for path in [path for folder in ("ampcompile", "passes", "kernels") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(s|d|\.\d?f)", "…", node.value))
    return "\n".join(found)


def test_each_quoted_message_is_one_that_is_raised_or_logged() -> None:
    headings = re.findall(r"^### (.*`.*)$", PAGE.read_text(), re.MULTILINE)
    quoted = {text for heading in headings for text in re.findall(r"`([^`]*)`", heading) if " " in text}
    assert quoted >= OTHERS
    said = texts()
    unknown = [text for text in quoted - OTHERS if not all(part.strip() in said for part in text.split("…"))]
    assert len(quoted) > 30 and not unknown

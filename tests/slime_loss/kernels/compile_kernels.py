"""Compiles every variant of the kernels for a GPU that need not be there; prints their PTX.

Usage: compile_kernels.py COMPUTE_CAPABILITY, without TRITON_INTERPRET in the environment.
"""

import sys
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slime_loss.kernels import row_kernels

Types = dict[str, str | int | bool | None]
"""By parameter: the type of what is passed, or its value where it is known beforehand."""

NOTHING_KEPT: Types = {"kept": None, "kept_stride": "i32", "kept_column_stride": "i32"}
KEPT: Types = {"kept": "*u8", "kept_stride": "i64", "kept_column_stride": 1}
LOGITS: Types = {"logits_stride": "i32", "num_columns": "i32", "label_columns": "*i64"}
ONE_COLUMN: Types = {"logits_stride": 1, "num_columns": 1, "label_columns": "*i64"}
RESULTS: Types = {
    "statistics": "*fp32",
    "maximum": "*fp32",
    "constant": "*fp32",
    "at_label": "*fp32",
}


def variants() -> Iterator[Types]:
    """The combinations in which the kernels are launched, each option in at least one."""
    for logits in ("*fp32", "*bf16", "*fp16"):
        base = LOGITS | RESULTS | {"logits": logits, "block": 4096}
        one = base | {"temperature": None, "per_row": False}
        yield one | NOTHING_KEPT | {"slope": None, "with_moment": False}
        number = base | {"temperature": "fp32", "per_row": False}
        yield number | KEPT | {"slope": None, "with_moment": True}
        rows = base | {"temperature": "*fp32", "per_row": True}
        yield rows | KEPT | {"slope": "*fp32", "with_moment": True, "logits_stride": "i64"}
        yield rows | NOTHING_KEPT | ONE_COLUMN | {"slope": "*fp32", "with_moment": True}


def compiled(kernel: object, types: Types, capability: int) -> str:
    """The PTX of one kernel."""
    signature, constants = {}, {}
    for name in kernel.arg_names:
        given = types[name]
        if isinstance(given, str):
            signature[name] = given
        else:
            signature[name] = "constexpr"
            constants[name] = given
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 8}).asm["ptx"]


if __name__ == "__main__":
    for types in variants():
        for kernel in (row_kernels._statistics_kernel, row_kernels._gradient_kernel):
            ptx = compiled(kernel, types, int(sys.argv[1]))
            sys.stdout.write(f"// {kernel.__name__} {types['logits']}\n{ptx}\n")

"""Helpers for FX graphs traced by Dynamo."""

from quire.passes.fx.graph import (
    add_input,
    ancestors,
    compute_value,
    copy_graph,
    erase_dead,
    evaluate,
    is_pure,
    replace_node,
    with_own_code,
)
from quire.passes.fx.nodes import (
    ADD,
    LINEAR,
    MUL,
    SUB,
    argument,
    constant,
    fake_mode,
    is_function,
    is_method,
    is_module_tensor,
    is_tensor,
    module_path,
    number_constants,
    only_user,
    operands,
    placeholders,
    same_shape,
    schema_arguments,
    shape_conditions,
    source_name,
    symbolic,
    target_name,
    value,
    written_between,
    written_by,
)

__all__ = [
    "ADD", "LINEAR", "MUL", "SUB", "add_input", "ancestors", "argument", "compute_value", "constant", "copy_graph",
    "erase_dead", "evaluate", "fake_mode", "is_function", "is_method", "is_module_tensor", "is_pure", "is_tensor",
    "module_path", "number_constants", "only_user", "operands", "placeholders", "replace_node", "same_shape",
    "schema_arguments", "shape_conditions", "source_name", "symbolic", "target_name", "value", "with_own_code",
    "written_between", "written_by",
]

"""What a model without attention sites has instead, in words."""

from __future__ import annotations

import os
import re

from torch import fx

from quire.passes.fx import argument, module_path, target_name, torch_name, value, written_by
from quire.passes.rewrite.raise_written import filled_with, stopped_at

#: Operations of torch that attend, and the modules that call them.
_WHOLE = {
    "multi_head_attention_forward": "nn.MultiheadAttention", "_native_multi_head_attention": "nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "nn.TransformerEncoderLayer"}
_FRAME = re.compile(r'File "(.+?)", line (\d+), in .*\n *(.*)')


def unseen(graph: fx.Graph) -> str:
    """Why no attention was found in ``graph``, and what to do."""
    for node in graph.nodes:
        if node.op == "call_function" and target_name(node) == "flex_attention":
            return (f"flex_attention ({_place(node)}) attends by functions of the user's, score_mod and mask_mod, which quire "
                    "does not read. Call F.scaled_dot_product_attention with is_causal=True, or a mask made of position_ids")
        if node.op == "call_function" and target_name(node) in _WHOLE:
            kind = _WHOLE[target_name(node)]
            return (f"{kind} ({_place(node)}) attends in one operation, {target_name(node)}, which quire serves where nothing "
                    "reads its weights, it adds no keys (add_bias_kv, add_zero_attn), and no torch.autocast or torch.vmap is "
                    "around it. Or write the layer with nn.Linear for q, k and v, and F.scaled_dot_product_attention")
    step = stopped_at(graph)
    if step is None:
        return ("the model neither calls F.scaled_dot_product_attention nor torch.ops.quire.attention, nor writes "
                "softmax(q @ k.mT * scale + mask) @ v")
    return ("the model multiplies all tokens with all, but not as softmax(q @ k.mT * scale + mask) @ v: quire does not follow "
            f"the step {_step(step)} ({_place(step)}). Write it in that way, or call F.scaled_dot_product_attention")


def _step(node: fx.Node) -> str:
    name = torch_name(node) or target_name(node)
    if name == "getattr":
        return str(node.args[1])
    if written_by(node):
        return f"{name}, which changes a tensor in place"
    if len(node.users) > 1:
        return f"{name}, whose result is read {len(node.users)} times"
    if name == "softmax":
        dim = argument(node, 1, "dim")
        last = dim in (-1, value(node).dim() - 1)
        return f"softmax to {value(node).dtype}" if last else f"softmax over dimension {dim} (the keys are the last)"
    if (low := filled_with(node)) is not None and len(node.users) == 1:
        return (f"{name} by {low:g}, which a lower score would outweigh (-math.inf hides a key, and so does "
                f"torch.finfo({value(node).dtype}).min)")
    return name


def _place(node: fx.Node) -> str:
    """The module and the line of the user's code that made the node."""
    frames = [f for f in _FRAME.findall(node.meta.get("stack_trace") or "") if f"{os.sep}torch{os.sep}" not in f[0]]
    line = f'File "{os.path.basename(frames[-1][0])}", line {frames[-1][1]}: {frames[-1][2].strip()[:100]}' if frames else ""
    return "; ".join(part for part in (module_path(node), line) if part) or node.name

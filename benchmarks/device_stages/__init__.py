"""The stages of `on_device.py`, in order of value.

To add one, write a function from `Settings` to its figures, which begins with the imports that it
needs, and a function from its line to a row of the table (`table.py`); then add a `Stage` to
STAGES. Figures are JSON: `error` means failed, `skipped` not measured, both with the reason.
"""

from functools import partial

from .checks import bring_up_real, bring_up_tiny, environment, resume
from .graphs import graphs
from .head import head
from .options import options
from .servers import servers
from .settings import Stage
from .speed import decode, grpo, grpo_trl, update
from .table import (
    bring_up_row,
    decode_row,
    environment_row,
    graphs_row,
    grpo_row,
    head_row,
    options_row,
    resume_row,
    servers_row,
    trace_row,
    trl_row,
    update_row,
)
from .trace import trace

SHAPES = ("1.5b", "0.5b")
STAGES = (
    Stage("environment", 60, environment, environment_row),
    Stage("bring-up", 150, bring_up_tiny, bring_up_row),
    Stage("bring-up-real", 120, bring_up_real, bring_up_row),
    *(
        Stage(
            f"update-{shape}-{engine}", 75, partial(update, shape=shape, engine=engine), update_row
        )
        for engine in ("megatron", "fsdp")
        for shape in SHAPES
    ),
    *(Stage(f"decode-{shape}", 75, partial(decode, shape=shape), decode_row) for shape in SHAPES),
    Stage("grpo-0.5b", 75, partial(grpo, shape="0.5b"), grpo_row),
    Stage("grpo-0.5b-trl", 150, partial(grpo_trl, shape="0.5b"), trl_row),
    Stage("resume", 90, resume, resume_row),
    Stage("graphs-1.5b", 75, partial(graphs, shape="1.5b"), graphs_row),
    Stage("head-1.5b", 60, partial(head, shape="1.5b"), head_row),
    Stage("options-1.5b", 150, partial(options, shape="1.5b"), options_row),
    Stage("options-1.5b-fsdp", 60, partial(options, shape="1.5b", engine="fsdp"), options_row),
    Stage("vllm-1.5b", 240, partial(servers, shape="1.5b"), servers_row),
    Stage("trace-1.5b", 75, partial(trace, shape="1.5b"), trace_row),
    Stage("grpo-1.5b", 90, partial(grpo, shape="1.5b"), grpo_row),
)

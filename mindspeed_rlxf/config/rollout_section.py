"""The section `rollout`: its engine, servers, tools, agents, and how far generation runs ahead."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from mindspeed_rlxf.config.fields import FilePath, Section, Word, free, key, reshard
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.tool_schema import PYTHON

AGENT_COLUMN = "agent_name"
"""Column with the name of a row's agent."""
BY_ROW = "by_row"
"""Value of `rollout.agent` by which only AGENT_COLUMN names agents."""
TOOL_AGENT = "tools"
"""Default agent with `rollout.tools`."""
PROGRAM_AGENT = "program"
"""Default agent with `rollout.program`."""


class VllmConfig(Section):
    """Servers of the rollout engine `vllm`, one for each replica."""

    section_used_if = "runs_vllm"

    python: FilePath | None = free(
        None, "interpreter of the environment with vLLM; null = the run's own"
    )
    tensor_parallel_size: int | None = reshard(
        None, "devices of a server; null = rollout.tensor_model_parallel_size", ge=1
    )
    max_num_seqs: int | None = free(
        None,
        "requests computed at once; null = actor_rollout.num_samples_per_step, else as many as fit "
        "into the KV cache (64 to 512), on CPU 256",
        ge=1,
    )
    gpu_memory_utilization: float = free(
        0.5, "fraction of a device's memory for weights and KV cache", gt=0, le=1
    )
    kv_cache_gib: float | None = free(
        None, "KV cache of a device, GiB; null = by gpu_memory_utilization, on CPU 1", gt=0
    )
    enforce_eager: bool = free(
        True,
        "compile no graphs: slower on devices, starts sooner; true until a device has shown that "
        "graphs read the weights that are sent",
    )
    extra_args: dict[str, Any] = free(
        {}, "further options of `vllm serve`, which win; false = --no-NAME"
    )


class ToolConfig(Section):
    """A function that models may call. In the YAML its name may replace the section."""

    function: str = key(..., "path/to/file.py:name, or python: runs programs in reward.sandbox")
    sha256: str | None = key(
        None, "SHA-256 of the file's text; a run is not resumed with another text"
    )

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return self.function.rpartition(":")[2]

    @property
    def is_python(self) -> bool:
        """Whether it is the tool that runs programs in the sandbox."""
        return self.function == PYTHON


class ProgramConfig(Section):
    """A program that leads conversations. In the YAML its text may replace the section."""

    run: str = key(..., "a function, path/to/file.py:name, or a command")
    sha256: str | None = key(
        None, "SHA-256 of a function's file; a run is not resumed with another text"
    )
    folder: FilePath | None = free(None, "where a command runs; null = where the run was started")


class RolloutConfig(Section):
    """The rollout engine, and its layout on `actor_rollout.num_gpus_for_infer` devices."""

    engine: str = key(
        "native",
        "rollout engine: native, vllm, transformers (slower), or the name of a plugin's engine",
    )
    vllm: VllmConfig = key(VllmConfig(), "the servers of the engine vllm")
    tensor_model_parallel_size: int | None = reshard(
        None, "ranks that share a layer in generation; null = as in training", ge=1
    )
    expert_model_parallel_size: int | None = reshard(
        None,
        "replicas that share the experts of a layer in generation, which then make each step "
        "together; null = as in training on the actor's devices, 1 on devices of its own",
        ge=1,
    )
    first_rank_draws: bool = free(
        False,
        "logits go to the first rank of a tensor-parallel group alone, which draws the tokens for "
        "all; off until devices have shown that both ways agree",
        used_if="engine=native; rollout_tp>1",
    )
    decode_graphs: bool = free(
        False,
        "on CUDA the host launches a decode step as one graph, without experts, tensor parallelism "
        "and training.deterministic; off until devices have shown that both ways agree",
        used_if="engine=native; rollout_tp=1; !actor_rollout.architecture.num_experts; "
        "!training.deterministic",
    )
    tools: Annotated[tuple[ToolConfig, ...], Word] = key(
        (),
        "functions that the model may call, path/to/file.py:name or python; the agent is then "
        "`tools` where rollout.agent names none",
    )
    tool_processes: int = free(
        4, "processes that run tools beside each replica", ge=1, used_if="tools"
    )
    max_tool_response_length: int = key(
        1024,
        "longest result of a tool that the model reads, characters; longer ones are truncated "
        "in the middle",
        ge=2,
        used_if="tools",
    )
    max_staleness: int = key(
        0,
        "most updates between the weights that sampled a token and those that train it; "
        "0 = synchronous",
        ge=0,
        only_if="!actor_rollout.fixed_responses",
    )
    slice_steps: int = key(
        256,
        "decode steps of a slice, after which finished responses are collected; absent = 32 with "
        "agents",
        ge=1,
        used_if="runs_slices",
    )
    slice_s: float | None = free(
        None,
        "longest time of a slice with the engine vllm, seconds; responses then go on in the next "
        "one, so that a run is not the same again; null = none",
        gt=0,
        used_if="runs_slices; runs_vllm",
    )
    lead: int | None = reshard(
        None,
        "batches completed before the update of the previous one starts; null = 1 in "
        "disaggregated placement, else 0; meant for tests",
        ge=0,
        le=1,
        only_if="max_staleness",
    )
    agent: str | None = key(
        None,
        "agent that leads the conversation of each sample: a name that a plugin registers, or "
        "by_row = that of its column agent_name, which always goes before; null = none, or "
        "program with rollout.program, or tools with rollout.tools",
    )
    agent_lag: int = key(
        1,
        "slices after the one that ended a turn until its agent must have asked for the next; "
        "0 = none, so that generation waits for each tool",
        ge=0,
        used_if="runs_agents",
    )
    program: Annotated[ProgramConfig | None, Word] = key(
        None,
        "what leads conversations by OpenAI's API, a function (file.py:name) or a command; the "
        "agent is then `program` where rollout.agent names none",
    )
    program_processes: int = key(
        64,
        "conversations that a replica leads at the same time, each by a process; others begin "
        "as these end",
        ge=1,
        used_if="program",
    )
    gateway: bool = key(
        False,
        "serve conversations by OpenAI's API, for agents that open an endpoint; always with a "
        "program",
        used_if="runs_agents",
    )
    gateway_host: str = free(
        "127.0.0.1",
        "address on which it listens; 0.0.0.0 = all, for programs on other hosts",
        used_if="opens_gateway",
    )
    max_turns: int = key(8, "most turns of a conversation", ge=1, used_if="runs_agents")
    turn_timeout_s: float = free(
        60.0,
        "longest time of an agent between two turns, seconds; then its sample is not trained",
        gt=0,
        used_if="runs_agents",
    )

    @property
    def runs_agents(self) -> bool:
        """Whether some samples may be conversations led by an agent."""
        return self.agent is not None or bool(self.tools) or self.program is not None

    @property
    def opens_gateway(self) -> bool:
        """Whether conversations have OpenAI's endpoints."""
        return self.gateway or self.program is not None

    @property
    def max_conversations(self) -> int | None:
        """Most conversations that a replica leads at the same time; None = no limit."""
        return None if self.program is None else self.program_processes

    @property
    def runs_slices(self) -> bool:
        """Whether generation runs in slices; else one call generates a batch."""
        return self.max_staleness > 0 or self.runs_agents

    def agent_of(self, extra_info: Mapping[str, Any]) -> str:
        """Return the name of the agent that leads a row's samples; "" for none."""
        if not self.runs_agents:
            return ""
        default = self.agent or (PROGRAM_AGENT if self.program else TOOL_AGENT)
        named = extra_info.get(AGENT_COLUMN)
        return str(named or ("" if default == BY_ROW else default))

    @property
    def runs_python(self) -> bool:
        """Whether the model may call the tool `python`."""
        return any(tool.is_python for tool in self.tools)

    def _broken_rules(self) -> Iterator[Problem]:
        names = [tool.name for tool in self.tools]
        repeated_names = sorted({name for name in names if names.count(name) > 1})
        if repeated_names:
            rule = f"must each have a name of its own, {', '.join(repeated_names)} is there twice"
            yield Problem("tools", rule, remedy="rename one of them")

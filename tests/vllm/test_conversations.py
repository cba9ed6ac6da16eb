"""Conversations behind the stand-in for a vLLM server: those of programs and of agents."""

from typing import Any

from tests.unit.roles.test_conversations import Talk, generate, make_role
from tests.unit.roles.test_programs import FILE, run_program, same_conversations
from tests.unit.roles.test_slices import prompts_of
from tests.unit.rollout.conftest import whole_model_decodes
from tests.vllm.test_client import make, tensors

__all__ = ["make", "make_role", "run_program", "whole_model_decodes"]  # fixtures


def test_a_program_leads_the_conversations_of_an_agent_in_the_process(
    make: Any, make_role: Any, run_program: Any
) -> None:
    prompts = prompts_of(0, 1, 2, 3)
    outputs, reports = [], []
    for name in ("program", "agent"):
        engine = make()
        engine.runs_slices = True
        engine.update_weights(tensors(), 0)
        if name == "program":
            role = run_program(f"{FILE}:talk_late", whole=engine)
        else:
            role = make_role(Talk(), engine, turn_timeout_s=60.0)
        output, of_slices = generate(role, prompts)
        outputs.append(output)
        reports.append(of_slices)
    same_conversations(*outputs)
    assert reports[0] == reports[1], "each slice ended the same samples"
    assert {len(record.turns) for record in outputs[0].report.records} == {1, 2, 3}

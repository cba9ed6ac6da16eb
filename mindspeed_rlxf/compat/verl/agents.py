"""verl's conversations of several turns: `multi_turn` and `agent` of its rollout.

Its agents `tool_agent` and `single_turn_agent`, which rows name in `agent_name`, exist here too.
Tools, interactions and other agents are classes of verl; here they are functions and plugins.
"""

from mindspeed_rlxf.compat.verl.table import ROLLOUT
from mindspeed_rlxf.compat.verl.translation import Translation

ENABLE = f"{ROLLOUT}.multi_turn.enable"
MAX_TURNS = f"{ROLLOUT}.multi_turn.max_assistant_turns"
MAX_LENGTH = f"{ROLLOUT}.multi_turn.max_tool_response_length"
SIDE = f"{ROLLOUT}.multi_turn.tool_response_truncate_side"


def convert_agents(keys: Translation) -> None:
    """Set the agent, its turns and the length of results, where several turns are on."""
    get, put = keys.get, keys.put
    if not get(ENABLE):
        return
    put("rollout.agent", "tool_agent", ENABLE)
    put("rollout.max_turns", get(MAX_TURNS) or get("data.max_response_length"), MAX_TURNS)
    put("rollout.max_tool_response_length", get(MAX_LENGTH), MAX_LENGTH)
    if get(SIDE) != "middle":
        keys.note("long results are truncated in the middle", SIDE)

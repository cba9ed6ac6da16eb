"""Files, names and calls of other toolkits, translated to ours; nothing below `cli` imports it."""

from mindspeed_rlxf.compat.verl import managers as managers  # registers how they are called

"""Families: architecture from config.json, Megatron modules, the parameter map, heads."""

"""Hugging Face <-> Megatron weights."""

"""Prompt data sets, their sampler and tokenizer, and the rows that cross role boundaries."""

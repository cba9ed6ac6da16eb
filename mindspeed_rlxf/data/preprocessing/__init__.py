"""Make indexed data sets of prompts, conversations or pairs from files of rows."""

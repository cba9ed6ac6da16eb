"""YAML keys and flags of MindSpeed-LLM, the older toolkit: translated, ignored or refused."""

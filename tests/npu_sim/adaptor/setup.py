"""Version of the small adaptor; `config.packages` reads MindSpeed's from this file."""

__version__ = "0.16.0"

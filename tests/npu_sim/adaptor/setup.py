"""Version of the small adaptor, where `mindspeed_rlxf.packages` reads MindSpeed's."""

__version__ = "0.16.0"

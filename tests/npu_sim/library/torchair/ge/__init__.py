"""`torchair.ge`."""

from imported import Imported

__getattr__ = Imported("torchair.ge").__getattr__

from .loop import Outcome as Outcome
from .loop import train as train
from .start import new_run as new_run
from .start import old_run as old_run

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import read_checkpoint as read_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint

from .generation import generate as generate
from .settings import Sampling as Sampling
from .trained import Trained as Trained
from .trained import load as load

from .sampling import Sampling as Sampling
from .sampling import generate as generate

from .sampling import generate as generate
from .settings import Sampling as Sampling

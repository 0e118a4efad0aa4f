from .engine import Engine as Engine
from .engine import EngineStats as EngineStats
from .generation import generate as generate
from .request import Completion as Completion
from .request import Request as Request
from .settings import Sampling as Sampling
from .trained import Trained as Trained
from .trained import load as load

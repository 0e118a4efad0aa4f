from .arithmetic import Arithmetic as Arithmetic
from .environment import Environment as Environment
from .environment import Outcome as Outcome
from .environment import SolvedEnvironment as SolvedEnvironment
from .environment import Task as Task
from .registry import ENVIRONMENTS as ENVIRONMENTS
from .registry import environment_named as environment_named

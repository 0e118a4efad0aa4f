from .widgets import LearnChart as LearnChart
from .widgets import PageWidget as PageWidget
from .widgets import PlanChart as PlanChart
from .widgets import RunChart as RunChart

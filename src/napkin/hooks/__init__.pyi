from .gradient_check import ArrangementResult as ArrangementResult
from .gradient_check import GradientCheck as GradientCheck
from .gradient_check import check as check
from .lightning_trainer import lightning_callback as lightning_callback
from .program_plan import ProgramPlan as ProgramPlan
from .transformers_trainer import trainer_callback as trainer_callback
from .watched_loop import WatchedLoop as WatchedLoop
from .watched_loop import watch as watch

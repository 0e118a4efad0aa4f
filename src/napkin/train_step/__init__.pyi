from .step import TrainState as TrainState
from .step import build_train_state as build_train_state
from .step_ledger import count_step as count_step

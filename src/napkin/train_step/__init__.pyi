from .step import Learner as Learner
from .step import build_learner as build_learner
from .step import count_step as count_step

from .precision import Precision as Precision
from .recipe import DataConfig as DataConfig
from .recipe import OptimizerConfig as OptimizerConfig
from .recipe import Recipe as Recipe
from .recipe import TrainingConfig as TrainingConfig
from .recipe import format_recipe as format_recipe
from .recipe import read_recipe as read_recipe
from .tracking_config import TrackingConfig as TrackingConfig

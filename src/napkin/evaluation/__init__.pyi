from .bits_per_byte import Evaluation as Evaluation
from .bits_per_byte import evaluate as evaluate
from .bits_per_byte import mean_loss as mean_loss

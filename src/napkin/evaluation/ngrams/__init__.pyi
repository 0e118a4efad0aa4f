from .model import NgramModel as NgramModel
from .model import train_ngrams as train_ngrams
from .model import training_bytes as training_bytes
from .plain import PlainKneserNey as PlainKneserNey

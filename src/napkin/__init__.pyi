from .accounting import Ledger as Ledger
from .accounting import count as count
from .data import TokenFile as TokenFile
from .data import read_documents as read_documents
from .data import split_documents as split_documents
from .data import standard_library as standard_library
from .data import write_token_file as write_token_file
from .errors import NapkinError as NapkinError
from .inference import generate as generate
from .model import ModelConfig as ModelConfig
from .model import Transformer as Transformer
from .report import write_report as write_report
from .tensors import inspect as inspect
from .tokenizer import load_tokenizer as load_tokenizer
from .tokenizer import train_bpe as train_bpe
from .training import DataConfig as DataConfig
from .training import OptimizerConfig as OptimizerConfig
from .training import Recipe as Recipe
from .training import TrainingConfig as TrainingConfig
from .training import evaluate as evaluate
from .training import new_run as new_run
from .training import old_run as old_run
from .training import read_recipe as read_recipe
from .training import train as train

__version__: str

from .accounting import Ledger as Ledger
from .accounting import count as count
from .data import TokenFile as TokenFile
from .data import read_documents as read_documents
from .data import split_documents as split_documents
from .data import standard_library as standard_library
from .data import write_token_file as write_token_file
from .errors import NapkinError as NapkinError
from .evaluation import evaluate as evaluate
from .inference import generate as generate
from .model import ModelConfig as ModelConfig
from .model import Transformer as Transformer
from .recipe import DataConfig as DataConfig
from .recipe import OptimizerConfig as OptimizerConfig
from .recipe import Recipe as Recipe
from .recipe import TrainingConfig as TrainingConfig
from .recipe import read_recipe as read_recipe
from .report import write_report as write_report
from .tensors import inspect as inspect
from .tokenizer import load_tokenizer as load_tokenizer
from .tokenizer import train_bpe as train_bpe
from .training import new_run as new_run
from .training import old_run as old_run
from .training import train as train

__version__: str

from .accounting import Ledger as Ledger
from .accounting import count as count
from .errors import NapkinError as NapkinError
from .tokenizer import load_tokenizer as load_tokenizer
from .tokenizer import train_bpe as train_bpe

__version__: str

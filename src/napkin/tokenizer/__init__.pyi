from .base import Tokenizer as Tokenizer
from .bpe import BPETokenizer as BPETokenizer
from .bpe_training import train_bpe as train_bpe
from .byte_level import ByteTokenizer as ByteTokenizer
from .characters import CharacterTokenizer as CharacterTokenizer
from .patterns import PATTERNS as PATTERNS
from .storage import load_tokenizer as load_tokenizer
from .storage import save_tokenizer as save_tokenizer

from .encoder import Encoder as Encoder
from .loading import COMPILED_PATTERNS as COMPILED_PATTERNS
from .loading import load as load

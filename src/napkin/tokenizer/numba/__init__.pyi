from .counting import PreTokenCounter as PreTokenCounter
from .dispatch import COMPILED_PATTERNS as COMPILED_PATTERNS
from .dispatch import CORE as CORE
from .encoding import Encoder as Encoder
from .learn_merges import learn_merges_compiled as learn_merges_compiled

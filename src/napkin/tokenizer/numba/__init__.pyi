from .dispatch import COMPILED_PATTERNS as COMPILED_PATTERNS
from .dispatch import CORE as CORE
from .encoder import Encoder as Encoder
from .merge_learner import learn_merges_compiled as learn_merges_compiled
from .pre_token_counter import PreTokenCounter as PreTokenCounter

from .encoder import Encoder as Encoder
from .loading import COMPILED_PATTERNS as COMPILED_PATTERNS
from .loading import CORE as CORE
from .merge_learner import learn_merges_compiled as learn_merges_compiled
from .pre_token_counter import PreTokenCounter as PreTokenCounter

from .joining import join_ranks as join_ranks
from .modules import DDP as DDP
from .modules import FSDP as FSDP
from .modules import ShardedOptimizer as ShardedOptimizer
from .parallel_model import ParallelModel as ParallelModel
from .ranks import RankInfo as RankInfo
from .ranks import Ranks as Ranks
from .sharding import parallelize as parallelize

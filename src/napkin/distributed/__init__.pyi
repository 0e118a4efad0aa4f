from .joining import join_ranks as join_ranks
from .parallel_model import ParallelModel as ParallelModel
from .ranks import RankInfo as RankInfo
from .ranks import Ranks as Ranks
from .sharding import parallelize as parallelize

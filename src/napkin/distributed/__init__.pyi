from .parallelize import Spread as Spread
from .ranks import Ranks as Ranks

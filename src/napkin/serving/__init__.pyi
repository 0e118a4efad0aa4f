from .limits import Limits as Limits
from .run import serve as serve

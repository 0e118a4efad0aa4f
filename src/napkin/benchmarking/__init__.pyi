from .operators import OPERATORS as OPERATORS
from .operators import Operator as Operator

from .counting import count as count
from .ledger import Ledger as Ledger
from .ledger import Row as Row

from .applying import apply_stages as apply_stages
from .length import Length as Length
from .record import Record as Record
from .record import TraceEntry as TraceEntry
from .registry import make_stage as make_stage
from .stage import CorpusStage as CorpusStage
from .stage import Dropped as Dropped
from .stage import RecordStage as RecordStage

from .record import Record as Record
from .record import TraceEntry as TraceEntry
from .stage import CorpusStage as CorpusStage
from .stage import Dropped as Dropped
from .stage import RecordStage as RecordStage

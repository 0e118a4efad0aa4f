from .objective import BatchTotals as BatchTotals
from .objective import Objective as Objective
from .sequence_packing import SequenceMicroBatch as SequenceMicroBatch
from .sequence_packing import micro_batches_of as micro_batches_of
from .supervised import SupervisedObjective as SupervisedObjective
from .token_sequence import TokenSequence as TokenSequence
from .token_sequence import sequence_of as sequence_of

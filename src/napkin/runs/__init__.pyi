from .accounting_files import MeasurementFile as MeasurementFile
from .accounting_files import PlanFile as PlanFile
from .metrics import StepMetrics as StepMetrics
from .metrics import read_metrics as read_metrics
from .run_folder import RunFolder as RunFolder
from .run_folder import is_run as is_run
from .run_record import RunRecord as RunRecord
from .run_record import read_run_record as read_run_record

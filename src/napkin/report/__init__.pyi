from .page import write_report as write_report
from .table import format_figure as format_figure
from .table import format_ratio as format_ratio
from .table import reconcile_table as reconcile_table

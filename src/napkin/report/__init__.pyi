from .page import write_report as write_report
from .table import reconcile_table as reconcile_table
from .timeline_picture import timeline_svg as timeline_svg

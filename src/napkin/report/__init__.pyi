from .headline import reconcile_table as reconcile_table
from .page import write_report as write_report
from .timeline_picture import timeline_svg as timeline_svg

from .html_page import ExtractedPage as ExtractedPage
from .html_page import HtmlLimits as HtmlLimits
from .html_page import TooLarge as TooLarge
from .html_page import extract_html as extract_html
from .page_metadata import PageMetadata as PageMetadata

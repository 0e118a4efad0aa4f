from .html_page import ExtractedPage as ExtractedPage
from .html_page import HtmlLimits as HtmlLimits
from .html_page import NotExtracted as NotExtracted
from .html_page import extract_html as extract_html
from .page_metadata import PageMetadata as PageMetadata
from .pdf_document import ExtractedPdf as ExtractedPdf
from .pdf_document import PdfLimits as PdfLimits
from .pdf_document import extract_pdf as extract_pdf

"""The state and the tables of the compiled functions: int64 arrays, passed by their addresses.

Addresses in the state belong to arrays that the Python side keeps alive; nothing is allocated in compiled code.
"""

# The state. The page is UTF-8, as the parser serializes it; the tables of tags and of evidence (tags.py).
PAGE, N_BYTES, TAGS, AUTOMATON, FOUND = range(5)
# Room for ROOM elements and as many blocks, and how many there are.
ELEMENTS, BLOCKS, ROOM, N_ELEMENTS, N_BLOCKS = range(5, 10)
# Room for as many bytes as the page has, and how many of them are text: UTF-8, references decoded.
TEXT, N_TEXT = 10, 11
N_STATE = 12

# In the text these stand where code begins or ends within a sentence, and where a line was broken. Other control
# characters of the page are left out.
CODE_MARK, LINE_BREAK = 1, 10

# A row of ELEMENTS: its tag, the row of its parent (0 for the root), where it begins in the page and where its content
# ends; the bits of evidence and of places in tags.py that its own start tag sets, and those that it and all
# above it set; sums over the blocks in it: characters, characters in links, characters of prose, blocks.
TAG, PARENT, BEGIN_TAG, END, EVIDENCE, ALL_EVIDENCE, DEPTH = range(7)
SUM_CHARACTERS, SUM_LINKED, SUM_PROSE, SUM_BLOCKS = range(7, 11)
N_ELEMENT = 11

# A row of BLOCKS, a run of text in one element: the row of that element, where it begins in the page, where it begins
# and ends in the text; characters, words, characters in links, links, sentence marks (commas, full stops ...), digits,
# capitalized words, bold characters; whether it ends as a sentence does.
ELEMENT, PLACE, BEGIN, STOP, CHARACTERS, WORDS, LINKED, LINKS, MARKS, DIGITS, CAPITALS, BOLD, IS_SENTENCE = range(13)
N_BLOCK = 13

"""The state and the tables of the compiled functions: int64 arrays, passed by their addresses.

Addresses in the state belong to arrays that the Python side keeps alive; nothing is allocated in compiled code.
"""

# The state. The page is UTF-8, as the parser serializes it; the tables of tags and of evidence (tags.py).
PAGE, N_BYTES, TAGS, AUTOMATON, FOUND = range(5)
# Room for ROOM elements and as many blocks, and how many there are.
ELEMENTS, BLOCKS, ROOM, N_ELEMENTS, N_BLOCKS = range(5, 10)
# Room for as many bytes as the page has, and how many of them are text: UTF-8, references decoded.
TEXT, N_TEXT = 10, 11
# Where the scan is: the row of the open element; where the row of the block that is being read begins, or NO_BLOCK; the
# links and the bold elements that are open; how far code within a sentence is read; line breaks since the block's last
# text; 1 if a space stands before its next character.
CURRENT, BLOCK, OPEN_LINKS, OPEN_BOLD, CODE, BREAKS, SPACED = range(12, 19)
N_STATE = 19
NO_BLOCK = -1
# Code within a sentence: none, its tag was read, its first character was.
NO_CODE, CODE_WANTED, IN_CODE = range(3)

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

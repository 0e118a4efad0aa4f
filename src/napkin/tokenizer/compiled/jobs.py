"""What compiled functions work on: a job, an array of int64 whose address is their one argument.

Each name below is a place in that array. Addresses come from numpy arrays that the Python side keeps alive; compiled
code neither makes nor frees memory. Where room runs out it stops at a place to go on from and says what it needs.
"""

from napkin.tokenizer.compiled.intrinsics import load_i64, store_i64
from napkin.tokenizer.compiled.machine_code import part

# The text and where to go on in it. TEXT is an address, LIMIT the bytes that may be read; DOCUMENT_ENDS an address of
# N_DOCUMENTS int64 offsets, document i begins where document i - 1 ends; DOCUMENT and POSITION are where to go on.
TEXT, LIMIT, DOCUMENT_ENDS, N_DOCUMENTS, DOCUMENT, POSITION = range(6)
# The scanner's code, its classes, and room for QUEUE + MARGIN ends and as many keys of 16 bytes.
SCANNER, CLASSES, ENDS, KEYS = range(6, 10)
# Where uint32 ids go, for how many there is room, how many are written; int64 tokens by document (0: not wanted).
IDS, IDS_ROOM, N_IDS, N_IDS_BY_DOCUMENT = range(10, 14)
# The table of pre-tokens: N_SLOTS (a power of two) entries of 32 bytes, how many are taken and may be; see cache.py.
TABLE, N_SLOTS, N_ENTRIES, ENTRIES_ROOM = range(14, 18)
# Bytes of pre-tokens too long for the table, and uint32 ids of those that have too many for it.
LONG_BYTES, LONG_BYTES_USED, LONG_BYTES_ROOM, LONG_IDS, LONG_IDS_USED, LONG_IDS_ROOM = range(18, 24)
# The vocabulary: merged ids of byte pairs, a hash table of the other pairs; see merging.py.
BYTE_PAIRS, PAIRS, PAIRS_SHIFT, N_BUCKETS = range(24, 28)
# Room for merging pre-tokens of up to SHORT bytes; for longer ones, of at most LONG_ROOM bytes; see merging.py.
SHORT_IDS, SHORT_RANKS, PLACES, LONG_ROOM, RANKS, RANK_BITS, VOCABULARY = range(28, 35)
# Bytes that the long pre-token needs at which a compiled function stopped.
NEEDED_BYTES = 35
# Pre-tokens of the queue that are new, three int64 each: address of the entry, address of the text, bytes.
NEW, N_NEW = 36, 37
N_FIELDS = 38

# What a compiled function returns: done, or what it needs before it is called again.
DONE, NEEDS_TABLE, NEEDS_IDS, NEEDS_LONG_ROOM = range(4)

# Pre-tokens that are looked up together, while the memory of their entries is on its way.
QUEUE = 512


@part
def get(job, field):
    """The value of a field."""
    return load_i64(job + 8 * field)


@part
def put(job, field, value):
    """Set a field."""
    store_i64(job + 8 * field, value)

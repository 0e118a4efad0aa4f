from .document_decisions import exact_duplicates as exact_duplicates
from .document_decisions import near_duplicates as near_duplicates
from .minhash import Banding as Banding
from .minhash import MinHash as MinHash
from .minhash import choose_banding as choose_banding
from .minhash import estimated_similarity as estimated_similarity
from .minhash import plain_signature as plain_signature

"""Where torch.compile keeps what it has made, and what it keeps: whoever compiles asks for this first."""

import os

from napkin.files import cache_folder


def set_up_compiler() -> None:
    """Have torch keep machine code alone, and in a folder of the user's.

    Its own choice is a folder in /tmp, into which others may write first; and what it knows of graphs it would keep as
    pickles, and read them.
    """
    from torch._dynamo import config as tracing
    from torch._functorch import config as differentiating
    from torch._inductor import config as generating
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch writes its own choice there as soon as it has looked for it.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "torch")
    tracing.automatic_dynamic_local_pgo = False
    differentiating.enable_autograd_cache = False
    generating.fx_graph_cache = False
    # They would lie in /tmp whatever is said.
    generating.cpp_cache_precompile_headers = False

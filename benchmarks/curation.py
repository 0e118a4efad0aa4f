"""Every measured figure of curation beside its peers, one script after another, each on one core.

    python benchmarks/curation.py --texts /usr/share/doc --articles FOLDER --udhr udhr2.zip

FOLDER is the article extraction benchmark (`html/*.html.gz`, `ground-truth.json`), udhr2.zip the Declaration of Human
Rights of nltk_data; what is not named is left out. Peers that are not installed are named and left out: datasketch,
rensa, datatrove, text-dedup, trafilatura, langid, py3langid, lingua-language-detector.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Run the scripts; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", default=["/usr/share/doc"], help="files and folders of real text")
    parser.add_argument("--articles", help="folder of the article extraction benchmark")
    parser.add_argument("--udhr", help="udhr2.zip")
    options = parser.parse_args()
    scripts = [["curation_deduplication.py", *options.texts], ["curation_filters.py", *options.texts]]
    if options.udhr:
        scripts.append(["curation_language.py", options.udhr])
    if options.articles:
        scripts.append(["curation_extraction.py", options.articles])
    failed = 0
    for script, *arguments in scripts:
        print(f"\n## {script}", flush=True)
        failed += bool(subprocess.run([sys.executable, str(HERE / script), *arguments], check=False).returncode)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
